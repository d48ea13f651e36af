//! Which Python a command runs, found without running the command.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A script names its interpreter within so many bytes.
const FIRST_BYTES: u64 = 4096;

/// The Python that `program` is, or that runs it: `python3.12`, and `pytest` or `torchrun` by their first line. For
/// anything else the Python that runs us, or the one in `PATH`.
pub(crate) fn of(program: &OsStr, own: Option<&Path>) -> OsString {
    if is_python(Path::new(program)) {
        return program.to_owned();
    }
    let script = located(program).and_then(|path| first_bytes(&path));
    let named = script.as_deref().and_then(interpreter_of);
    named.or_else(|| own.map(|path| path.as_os_str().to_owned())).unwrap_or_else(in_path)
}

/// Whether this Python, started with these variables, has the libraries in `folder` loaded.
pub(crate) fn loads(python: &OsStr, folder: &Path, environment: &[(OsString, OsString)]) -> bool {
    const PROGRAM: &str = "import sys; sys.exit(sys.argv[1] not in open('/proc/self/maps').read())";
    let status = Command::new(python)
        .args(["-S", "-c", PROGRAM])
        .arg(folder)
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// Whether a program is an interpreter, by its name.
pub(crate) fn is_python(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let version = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.' || c == 't'))
}

/// The file that the shell would run.
fn located(program: &OsStr) -> Option<PathBuf> {
    let path = PathBuf::from(program);
    if path.components().count() > 1 {
        return Some(path);
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file())
}

fn first_bytes(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    fs_err::File::open(path).ok()?.take(FIRST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// `#!/venv/bin/python`, `#!/usr/bin/env python3`, and what installers write where the path is long or has spaces:
/// `#!/bin/sh`, then `'''exec' /venv/bin/python "$0" "$@"`.
fn interpreter_of(script: &str) -> Option<OsString> {
    let mut lines = script.lines();
    let first = lines.next()?.strip_prefix("#!")?;
    let words = first.split_whitespace().map(str::to_owned);
    let quoted = lines.next().and_then(|line| line.strip_prefix("'''exec' ")).map(|rest| {
        let path =
            rest.strip_prefix('"').map_or_else(|| rest.split(' ').next(), |rest| rest.split('"').next());
        path.unwrap_or_default().to_owned()
    });
    words.chain(quoted).find(|word| is_python(Path::new(word))).map(OsString::from)
}

fn in_path() -> OsString {
    let found = ["python3", "python"].into_iter().find(|name| located(OsStr::new(name)).is_some());
    found.unwrap_or("python3").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_interpreter_of_a_script() {
        for (script, interpreter) in [
            ("#!/venv/bin/python\nimport re\n", Some("/venv/bin/python")),
            ("#!/usr/bin/env python3\n", Some("python3")),
            ("#!/usr/bin/env -S python3.12 -u\n", Some("python3.12")),
            ("#!/bin/sh\n'''exec' \"/a b/bin/python3\" \"$0\" \"$@\"\n' '''\n", Some("/a b/bin/python3")),
            ("#!/bin/sh\n'''exec' /long/bin/python \"$0\" \"$@\"\n", Some("/long/bin/python")),
            ("#!/bin/bash\npython train.py\n", None),
            ("\u{7f}ELF", None),
        ] {
            assert_eq!(interpreter_of(script), interpreter.map(OsString::from), "{script}");
        }
    }

    #[test]
    fn a_python_is_its_own_interpreter_and_anything_else_has_ours() {
        assert_eq!(of(OsStr::new("/opt/python3.13t"), None), "/opt/python3.13t");
        assert_eq!(of(OsStr::new("/no/such/program"), Some(Path::new("/own"))), "/own");
        assert_ne!(of(OsStr::new("python-config"), Some(Path::new("/own"))), "python-config");
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_loads_nothing_is_seen() {
        assert!(!loads(OsStr::new("false"), Path::new("/tmp"), &[]));
        assert!(!loads(OsStr::new("python-of-nobody"), Path::new("/tmp"), &[]));
    }
}
