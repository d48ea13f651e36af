//! The `unhand` command inside a Python process: the entry point of the wheel calls it.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;

/// Runs the command line `argv`, program name first, and gives the exit code.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> u8 {
    // What the command says about Python is about this one, unless it is told otherwise.
    let python = py.import("sys").and_then(|sys| sys.getattr("executable")?.extract::<PathBuf>()).ok();
    let python = python.filter(|path| !path.as_os_str().is_empty());
    // Other threads of the process go on: a command may take minutes.
    py.detach(|| unhand_cli::run_in(python.as_deref(), argv))
}

/// What `unhand run` on the command line `argv` asks for, as JSON; `None` for any other command line.
#[pyfunction]
pub(crate) fn run_plan(argv: Vec<OsString>) -> Option<String> {
    unhand_cli::run_plan(argv)
}
