//! `unhand run`: a Python program with the flight recorder on. Python runs it; this file says what and how.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::exec;
use crate::failure::{Failure, Outcome};

/// The interpreter when the command is not inside one.
const DEFAULT_PYTHON: &str = "python3";

const AFTER_HELP: &str = "\
Examples:
  unhand run train.py --epochs 3                    options of unhand stand before the script
  unhand run --recordings oom -m my.module          as `python -m my.module`
  torchrun --nproc-per-node 8 -m unhand run train.py
  unhand explain unhand-oom/                        what it says, and which rank was different

The program runs as with `python`: its arguments, exit code, tracebacks and signals are its own. At
its first out-of-memory error a folder is written: report.txt, report.json and snapshot.pickle.";

/// Run a Python program; if it runs out of GPU memory, write down why
#[derive(Debug, Args)]
#[command(
    after_help = AFTER_HELP,
    override_usage = "unhand run [OPTIONS] SCRIPT [ARGS]...\n       unhand run [OPTIONS] -m MODULE [ARGS]..."
)]
pub(crate) struct Arguments {
    /// The folder for recordings; each gets a folder of its own in it
    #[arg(long, value_name = "DIR", default_value = "unhand-oom")]
    recordings: PathBuf,

    /// What to record of every allocation
    #[arg(long, value_name = "WHAT", default_value = "stacks")]
    history: History,

    /// How many allocations and frees are kept, the newest
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    max_entries: u64,

    /// How many out-of-memory errors are recorded, the first ones
    #[arg(long, value_name = "N", default_value_t = 1)]
    limit: u64,

    /// The script, a folder or archive with a `__main__.py`, or `-m MODULE`; then its own arguments
    // All of it is one list: what follows the script or the module belongs to the program, whatever it looks like.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "SCRIPT")]
    program: Vec<OsString>,
}

/// How much of the history of allocations is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum History {
    /// Sizes and times, with the Python stack of each allocation
    Stacks,
    /// Sizes and times
    Events,
    /// Nothing: what the program itself records is used
    Off,
}

/// What Python needs to know to run the program.
#[derive(Debug, Serialize)]
struct Plan<'a> {
    module: Option<&'a str>,
    script: Option<&'a str>,
    args: &'a [&'a str],
    recordings: &'a Path,
    history: History,
    max_entries: u64,
    limit: u64,
}

impl Arguments {
    /// The plan as JSON.
    pub(crate) fn plan(&self) -> Result<String, Failure> {
        let words = self.program.iter().map(|word| word.to_str()).collect::<Option<Vec<_>>>();
        let words = words.ok_or_else(|| Failure::bad_use("cannot run: an argument is not valid UTF-8"))?;
        let (module, script, args) = match words.as_slice() {
            ["-m", module, args @ ..] => (Some(*module), None, args),
            [script, args @ ..] if !script.starts_with('-') => (None, Some(*script), args),
            ["-m"] => return Err(Failure::bad_use("`-m` needs the name of a module")),
            words => {
                let message = format!("unexpected argument: `{}`", words.first().unwrap_or(&""));
                return Err(Failure::bad_use(message)
                    .hint("options of `unhand run` are listed by `unhand run --help`"));
            }
        };
        let Arguments { recordings, history, max_entries, limit, .. } = self;
        let plan = Plan {
            module,
            script,
            args,
            recordings,
            history: *history,
            max_entries: *max_entries,
            limit: *limit,
        };
        serde_json::to_string(&plan).map_err(|error| Failure::bad_use("cannot run").because(&error))
    }
}

/// Outside of Python: Python's own command takes over, with the same arguments.
pub(crate) fn run(arguments: &Arguments, python: Option<&Path>) -> Result<Outcome, Failure> {
    arguments.plan()?;
    if python.is_some() {
        // The Python package asks for the plan first, and comes here only without one.
        return Err(Failure::bad_use(
            "cannot run from here: start the command `unhand` of the Python package",
        ));
    }
    let mut command = Command::new(DEFAULT_PYTHON);
    command.args(["-m", "unhand"]).args(std::env::args_os().skip(1));
    let error = exec::replace(&mut command);
    Err(Failure::bad_input(format!("cannot start: `{DEFAULT_PYTHON}`"))
        .because(&error)
        .hint("`unhand run` needs Python with the package: `pip install unhand`"))
}
