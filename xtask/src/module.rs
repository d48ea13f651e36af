//! Builds the extension module and puts it beside the Python package, where an import from the checkout finds it.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::tree::root;
use crate::{Failure, say};

const PACKAGE: &str = "unhand-python";
/// Ignored by git. The ending is that of a module for every Python from 3.10 on.
const PLACE: &str = "python/unhand/_native.abi3.so";

/// Builds and places the module; false if it does not compile.
pub(crate) fn place(is_release: bool) -> Result<bool, Failure> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--message-format=json-render-diagnostics"]);
    if is_release {
        command.args(["--release", "--package", PACKAGE]);
    } else {
        // With the features that the tests have built it with: for one package alone cargo would build all of it again.
        command.arg("--workspace");
    }
    let output = command
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run `cargo build`: {error}"))?;
    if !output.status.success() {
        return Ok(false);
    }
    let library = library_of(&String::from_utf8(output.stdout)?)
        .ok_or_else(|| format!("cargo built `{PACKAGE}` without a shared library"))?;
    let place = root().join(PLACE);
    // By a rename, because a Python that runs now may have the old file mapped.
    let draft = place.with_file_name(".native.so");
    fs_err::copy(&library, &draft)?;
    fs_err::rename(&draft, &place)?;
    say(&format!("{PLACE}, from {}", library.display()));
    Ok(true)
}

/// The shared library among the artifacts that cargo lists, one JSON document a line.
fn library_of(messages: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let files = messages
        .filter(|message| message["reason"] == "compiler-artifact")
        .filter(|message| message["target"]["name"] == PACKAGE.replace('-', "_"))
        .filter_map(|message| message["filenames"].as_array().cloned());
    let mut paths = files.flatten().filter_map(|file| file.as_str().map(PathBuf::from));
    paths.find(|path| path.extension().is_some_and(|ending| ending == "so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_library_among_what_cargo_built() {
        let messages = r#"
            {"reason":"compiler-artifact","target":{"name":"libc"},"filenames":["/t/liblibc.rlib"]}
            {"reason":"compiler-artifact","target":{"name":"other"},"filenames":["/t/libother.so"]}
            {"reason":"compiler-artifact","target":{"name":"unhand_python"},"filenames":["/t/x.d","/t/libx.so"]}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(library_of(messages), Some(PathBuf::from("/t/libx.so")));
        assert_eq!(library_of(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
