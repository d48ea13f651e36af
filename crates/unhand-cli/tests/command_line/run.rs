//! Runs `unhand` from the repository root and writes down all that can be seen of it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The command itself, with an environment that does not depend on who runs the test.
pub(crate) fn unhand(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unhand"));
    command.args(arguments).current_dir(repository()).env_clear().stdin(Stdio::null());
    command
}

/// Runs `unhand` and gives one text: how it ended, what it wrote.
pub(crate) fn run(arguments: &[&str]) -> String {
    describe(&unhand(arguments).output().expect("the binary was built for this test"))
}

/// As [`run`], with `folder` where the tests keep their temporary files written as `[FOLDER]`.
pub(crate) fn run_in(folder: &Path, arguments: &[&str]) -> String {
    run(arguments).replace(&folder.display().to_string(), "[FOLDER]")
}

/// The answer of a run that must succeed.
pub(crate) fn stdout_of(arguments: &[&str]) -> String {
    let output = unhand(arguments).output().expect("the binary was built for this test");
    assert!(output.status.success(), "{}", describe(&output));
    String::from_utf8(output.stdout).expect("answers are UTF-8")
}

/// The JSON answer of a run that must succeed.
pub(crate) fn json_of(arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&stdout_of(arguments)).expect("the answer is JSON")
}

/// One of the recordings, as a path from the repository root.
pub(crate) fn recording(name: &str) -> String {
    format!("tests/snapshots/{name}.pickle.xz")
}

/// The bytes of the pickle in a recording.
pub(crate) fn pickle_of(name: &str) -> Vec<u8> {
    let packed = fs_err::read(repository().join(recording(name))).expect("the recording is there");
    unhand_snapshot::decompress(&packed).expect("it is whole").into_owned()
}

pub(crate) fn describe(output: &Output) -> String {
    let code = output.status.code().map_or("none, ended by a signal".to_owned(), |code| code.to_string());
    let mut text = format!("exit code: {code}\n");
    for (name, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        let _ = writeln!(text, "----- {name}");
        for line in String::from_utf8_lossy(bytes).lines() {
            // clap pads the empty lines of its help.
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
    text
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
