//! What the driver says about the devices, for the Python package.

use std::error::Error as _;
use std::fmt::Write as _;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use unhand_monitor::{Error, Nvml, Sampler};

/// All devices and the processes on them as the driver sees them now, as JSON; makes no CUDA context.
///
/// `RuntimeError` says why there is no answer: no driver, no permission.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<String> {
    // The driver may take its time, above all when it has slept.
    let sample =
        py.detach(|| Nvml::load()?.sample()).map_err(|error| PyRuntimeError::new_err(text_of(&error)))?;
    serde_json::to_string(&sample).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// The error, its causes and what to do, as the command writes them.
fn text_of(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        // Some errors repeat their cause in their own words.
        if !text.ends_with(&words) {
            let _ = write!(text, "\n  caused by: {words}");
        }
        cause = error.source();
    }
    if let Some(hint) = error.hint() {
        let _ = write!(text, "\n\nhint: {hint}");
    }
    text
}
