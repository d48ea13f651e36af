//! The `unhand` command inside a Python process: the entry point of the wheel calls it.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line `argv`, program name first, and gives the exit code.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> u8 {
    // Other threads of the process go on: a command may take minutes.
    py.detach(|| unhand_cli::run(argv))
}
