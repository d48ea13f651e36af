//! The extension module `unhand._native`: what the Python package cannot do in Python.

mod command;
mod devices;

use pyo3::pymodule;

#[pymodule]
mod _native {
    use pyo3::pyfunction;

    #[pymodule_export]
    use super::command::main;
    #[pymodule_export]
    use super::devices::devices;

    /// A number of bytes as people read it, for example `1.5 GiB`: the way the whole project writes sizes.
    #[pyfunction]
    fn format_bytes(bytes: u64) -> String {
        unhand_alloc::Bytes(bytes).to_string()
    }
}
