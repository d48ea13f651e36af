//! Asks a Python interpreter what is installed for it. PyTorch is found by its files and never imported.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The interpreter when none is named.
const DEFAULT: &str = "python3";
/// Finding modules reads folders, which takes long on some network file systems.
const PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(10);

/// Prints one line of JSON: an [`Interpreter`]. Works in Python 2 as far as to say that it is one.
const QUESTION: &str = r#"
import json, sys
answer = {"executable": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3], "packages": {}}
if sys.version_info >= (3, 8):
    import ast, importlib.metadata, importlib.util, os
    # With -c the current folder comes first, which is not where a script would look.
    sys.path = [folder for folder in sys.path if folder]
    for name in ("unhand", "IPython", "accelerate", "transformers"):
        try:
            answer["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            answer["packages"][name] = None
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        values = {}
        try:
            with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
                for node in ast.parse(file.read()).body:
                    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                    if isinstance(getattr(node, "value", None), ast.Constant):
                        values[getattr(targets[0], "id", "")] = node.value.value
        except (OSError, SyntaxError):
            pass
        answer["torch"] = {"version": values.get("__version__"), "cuda": values.get("cuda"), "hip": values.get("hip")}
print(json.dumps(answer))
"#;

/// A Python interpreter and what is installed for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interpreter {
    pub(crate) executable: String,
    pub(crate) version: String,
    #[serde(default)]
    pub(crate) torch: Option<Torch>,
    /// Packages that unhand works with, and their versions; `null` for one that is not installed.
    pub(crate) packages: BTreeMap<String, Option<String>>,
}

/// What `torch/version.py` says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Torch {
    pub(crate) version: Option<String>,
    /// The CUDA it is built for; `null` if it is not.
    pub(crate) cuda: Option<String>,
    /// The `ROCm` it is built for.
    pub(crate) hip: Option<String>,
}

/// Why no interpreter answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) executable: String,
    pub(crate) reason: String,
}

/// Asks the interpreter that was named, else the one that runs us, else the one in `PATH`.
pub(crate) fn ask(named: Option<&Path>, own: Option<&Path>) -> Result<Interpreter, Missing> {
    let executable = named.or(own).map_or(OsStr::new(DEFAULT), Path::as_os_str);
    answer_of(executable)
        .map_err(|reason| Missing { executable: executable.to_string_lossy().into_owned(), reason })
}

fn answer_of(executable: &OsStr) -> Result<Interpreter, String> {
    let mut child = Command::new(executable)
        .args(["-c", QUESTION])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let is_fine = wait(&mut child)?;
    let mut stdout = String::new();
    let mut stderr = String::new();
    // Both fit into a pipe, so that nobody has to read while the child runs.
    if let Some(mut pipe) = child.stdout.take() {
        let _ = pipe.read_to_string(&mut stdout);
    }
    if let Some(mut pipe) = child.stderr.take() {
        let _ = pipe.read_to_string(&mut stderr);
    }
    // What a `sitecustomize` prints comes before.
    let answer = stdout.lines().last().unwrap_or_default();
    match serde_json::from_str(answer) {
        Ok(interpreter) if is_fine => Ok(interpreter),
        _ => Err(stderr.lines().last().unwrap_or("it gives no answer").to_owned()),
    }
}

/// Whether the child ended well; an error if it does not end.
fn wait(child: &mut Child) -> Result<bool, String> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(status.success());
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it gives no answer within {} seconds", PATIENCE.as_secs()));
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_why_an_interpreter_does_not_answer() {
        let missing = ask(Some(Path::new("python-of-nobody")), None).expect_err("nobody has it");
        assert_eq!(missing.executable, "python-of-nobody");
        assert!(missing.reason.starts_with("No such file or directory"), "{}", missing.reason);
        let missing = ask(Some(Path::new("true")), None).expect_err("says nothing");
        assert_eq!(missing.reason, "it gives no answer");
    }

    #[test]
    fn pytorch_is_found_by_its_files_and_not_imported() {
        if Command::new(DEFAULT).arg("--version").output().is_err() {
            // A machine without Python: the scripts of `tests/python` cannot run there either.
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let torch = folder.path().join("torch");
        fs_err::create_dir(&torch).expect("a folder");
        fs_err::write(torch.join("__init__.py"), "raise SystemExit('imported')\n").expect("written");
        let version = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n\
                       hip: Optional[str] = None\n";
        fs_err::write(torch.join("version.py"), version).expect("written");
        // The interpreter is a script, so that the test needs no variable of its own process.
        let script = folder.path().join("python");
        let text = format!("#!/bin/sh\nPYTHONPATH='{}' exec {DEFAULT} \"$@\"\n", folder.path().display());
        fs_err::write(&script, text).expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs_err::set_permissions(&script, mode).expect("executable");
        let interpreter = ask(None, Some(&script)).expect("it answers");
        let torch = interpreter.torch.expect("found");
        assert_eq!(torch.version.as_deref(), Some("2.11.0+cu130"));
        assert_eq!((torch.cuda.as_deref(), torch.hip), (Some("13.0"), None));
        assert!(interpreter.packages.contains_key("IPython"));
    }
}
