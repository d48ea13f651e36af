//! The program under a dry run: found, started on the stand-in, and what it left.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use unhand_snapshot::{ReadOptions, Snapshot};
use unhand_standin::config;

use crate::failure::Failure;
use crate::stand_in::{Machine, interpreter};

const RUNNER: &str = include_str!("runner.py");
/// More than any machine has, and well within the stand-in's address space.
const CAPACITY_BYTES: u64 = 8 << 40;
/// Signals end a program with this much added to their number.
const SIGNALLED: i32 = 128;

/// What to run, and with which Python.
pub(super) struct Program {
    python: OsString,
    module: Option<String>,
    /// The script first, if it is one.
    words: Vec<OsString>,
}

/// Where what the program prints goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Shown,
    /// Stdout is for an answer in JSON.
    ToStderr,
    Hidden,
}

/// What a run left.
pub(super) struct Ran {
    pub(super) exit_code: u8,
    /// The history as PyTorch writes it; nothing if no memory of a device was used.
    pub(super) pickle: Option<Vec<u8>>,
    /// What the runner noted; nothing if the process ended before it could.
    pub(super) facts: Option<Facts>,
    /// Kernels and calls that computed nothing.
    pub(super) log: String,
    /// What a hidden program wrote to stderr.
    pub(super) stderr: String,
}

/// What the runner writes beside the history.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Facts {
    pub(super) torch: Option<String>,
    /// Of the optimizer that made most.
    pub(super) steps: u64,
    /// Whether `--max-steps` ended it.
    pub(super) stopped: bool,
    pub(super) devices: Vec<DeviceFacts>,
    pub(super) exit_code: u8,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct DeviceFacts {
    pub(super) device: usize,
    pub(super) name: String,
    /// What the device had given out beside PyTorch's allocator in the end.
    pub(super) outside_bytes: u64,
}

impl Program {
    /// From the words of the command line: `train.py …`, `-m module …`, and `python` before either.
    pub(super) fn of(words: &[OsString], own_python: Option<&Path>) -> Result<Program, Failure> {
        let (python, words) = match words.split_first() {
            Some((first, rest)) if interpreter::is_python(Path::new(first)) && !rest.is_empty() => {
                (first.clone(), rest)
            }
            _ => (interpreter::of(OsStr::new(""), own_python), words),
        };
        let (first, rest) =
            words.split_first().ok_or_else(|| Failure::bad_use("there is no script to run"))?;
        if first == "-m" {
            let name = rest.first().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| Failure::bad_use("-m needs the name of a module"))?;
            return Ok(Program { python, module: Some(name.to_owned()), words: rest[1..].to_vec() });
        }
        let shown = first.display();
        if first.to_string_lossy().starts_with('-') {
            return Err(Failure::bad_use(format!(
                "there is no option `{shown}`, and no script of that name"
            ))
            .hint("options of the script come after the script"));
        }
        if is_launcher(Path::new(first)) {
            return Err(Failure::bad_use(format!(
                "`{shown}` starts other processes, whose memory is not seen from here"
            ))
            .hint("give the script itself: it is run as one process, as the only rank"));
        }
        if !Path::new(first).is_file() {
            return Err(Failure::bad_use(format!("there is no script `{shown}`")));
        }
        Ok(Program { python, module: None, words: words.to_vec() })
    }

    /// Variables for a run on this machine that is never refused memory.
    pub(super) fn environment(&self, machine: &Machine) -> Result<Vec<(OsString, OsString)>, Failure> {
        let mut environment = machine.environment(&self.python)?;
        environment.push((config::CAPACITY.into(), CAPACITY_BYTES.to_string().into()));
        Ok(environment)
    }

    /// Whether an argument has a place for the value of `name`.
    pub(super) fn has_place(&self, name: &str) -> bool {
        let place = format!("{{{name}}}");
        self.words.iter().any(|word| word.to_string_lossy().contains(&place))
    }

    /// Runs it to its end. `values` are put in the place of `{name}`, or behind the arguments as `--name value`.
    pub(super) fn run(
        &self,
        environment: &[(OsString, OsString)],
        values: &[(&str, u64)],
        max_steps: Option<u64>,
        output: Output,
    ) -> Result<Ran, Failure> {
        let mut files = [scratch()?, scratch()?, scratch()?];
        let [snapshot, result, log] = [&files[0], &files[1], &files[2]].map(path_of);
        let spec = serde_json::json!({
            "module": self.module, "max_steps": max_steps, "snapshot": snapshot, "result": result,
        });
        let mut command = Command::new(&self.python);
        command.arg("-c").arg(RUNNER).arg(spec.to_string()).args(self.words_with(values));
        command.envs(environment.iter().cloned()).env(config::LOG, log);
        match output {
            Output::Shown => {}
            Output::ToStderr => {
                command.stdout(std::io::stderr());
            }
            Output::Hidden => {
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            }
        }
        let cannot_run =
            |error| Failure::bad_use(format!("cannot run `{}`", self.python.display())).because(&error);
        let child = command.spawn().map_err(cannot_run)?;
        let ended = child.wait_with_output().map_err(cannot_run)?;
        let [pickle, facts, log] = files.each_mut().map(contents);
        let facts: Option<Facts> = serde_json::from_slice(&facts?).ok();
        let pickle = Some(pickle?).filter(|bytes| !bytes.is_empty() && facts.is_some());
        let exit_code = code_of(ended.status);
        Ok(Ran {
            exit_code: facts.as_ref().map_or(exit_code, |facts| facts.exit_code.max(exit_code)),
            pickle,
            facts,
            log: String::from_utf8_lossy(&log?).into_owned(),
            stderr: String::from_utf8_lossy(&ended.stderr).into_owned(),
        })
    }

    fn words_with(&self, values: &[(&str, u64)]) -> Vec<OsString> {
        let mut words = self.words.clone();
        for (name, value) in values {
            let (place, value) = (format!("{{{name}}}"), value.to_string());
            if self.has_place(name) {
                for word in &mut words {
                    // A word that is not UTF-8 has no place in it that could be meant.
                    if let Some(text) = word.to_str().filter(|text| text.contains(&place)) {
                        *word = text.replace(&place, &value).into();
                    }
                }
            } else {
                words.extend([format!("--{name}").into(), value.into()]);
            }
        }
        words
    }
}

impl Ran {
    /// The history, read.
    pub(super) fn snapshot(&self) -> Result<Option<Snapshot>, Failure> {
        let Some(pickle) = &self.pickle else { return Ok(None) };
        let snapshot = Snapshot::read(pickle, &ReadOptions::default());
        snapshot
            .map(Some)
            .map_err(|error| Failure::bad_input("the recorded history cannot be read").because(&error))
    }

    /// Why there is no history.
    pub(super) fn without_history(&self) -> &'static str {
        match &self.facts {
            None => "the process ended before it could write one",
            Some(facts) if facts.torch.is_none() => "the program did not import torch",
            Some(_) => "this process used no memory of a GPU",
        }
    }
}

fn is_launcher(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    ["torchrun", "accelerate", "deepspeed", "mpirun"].iter().any(|launcher| name == *launcher)
}

/// A file without a name: whatever ends this process or the program, nothing is left.
fn scratch() -> Result<File, Failure> {
    tempfile::tempfile().map_err(|error| Failure::bad_input("cannot make a temporary file").because(&error))
}

/// How another process of this user opens it.
#[cfg(unix)]
fn path_of(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

#[cfg(not(unix))]
fn path_of(_: &File) -> PathBuf {
    // Never asked for: the stand-in has refused before.
    PathBuf::new()
}

fn contents(file: &mut File) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes));
    read.map_err(|error| Failure::bad_input("cannot read what the program left").because(&error))?;
    Ok(bytes)
}

fn code_of(status: std::process::ExitStatus) -> u8 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    let signal: Option<i32> = None;
    let code = status.code().or(signal.map(|signal| SIGNALLED + signal)).unwrap_or(1);
    u8::try_from(code & 0xff).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(words: &[&str]) -> Result<Program, Failure> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        Program::of(&words, Some(Path::new("/own/python")))
    }

    #[test]
    fn takes_scripts_modules_and_a_python_before_them() {
        let script = file!().rsplit_once("src/").map(|(_, rest)| format!("src/{rest}")).expect("a path");
        let own = program(&[&script, "--lr", "3"]).expect("a script");
        assert_eq!((own.python.to_str(), own.module, own.words.len()), (Some("/own/python"), None, 3));
        let module = program(&["python3.12", "-m", "pkg.train", "--lr"]).expect("a module");
        assert_eq!(
            (module.python.to_str(), module.module.as_deref()),
            (Some("python3.12"), Some("pkg.train"))
        );
        assert_eq!(module.words, ["--lr"]);
    }

    #[test]
    fn refuses_what_it_cannot_follow() {
        for words in [&["--max-step", "3"][..], &["torchrun", "train.py"], &["no-such-script.py"], &["-m"]] {
            assert_eq!(program(words).err().map(|failure| failure.exit_code()), Some(2), "{words:?}");
        }
    }

    #[test]
    fn a_value_goes_to_its_place_or_behind_the_arguments() {
        let module = |words: &[&str]| program(&[&["-m", "train"], words].concat()).expect("a module");
        assert_eq!(module(&["--lr", "1"]).words_with(&[("batch", 8)]), ["--lr", "1", "--batch", "8"]);
        assert_eq!(module(&["data.batch={batch}"]).words_with(&[("batch", 8)]), ["data.batch=8"]);
    }
}
