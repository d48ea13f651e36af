//! The extension module `unhand._native`: what the Python package cannot do in Python.

mod cache;
mod capture;
mod command;
mod devices;
mod heap;
mod replay;

use pyo3::pymodule;

#[pymodule]
mod _native {
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::command::{main, run_plan};
    #[pymodule_export]
    use super::devices::devices;
    #[pymodule_export]
    use super::heap::{Heap, HeapGraph, Nodes};

    /// A number of bytes as people read it, for example `1.5 GiB`: the way the whole project writes sizes.
    #[pyfunction]
    fn format_bytes(bytes: u64) -> String {
        unhand_alloc::Bytes(bytes).to_string()
    }

    /// Whether a request of so many bytes has the size of a workspace that PyTorch allocates for cuBLAS.
    #[pyfunction]
    fn is_cublas_workspace(bytes: u64) -> bool {
        unhand_analyze::is_cublas_workspace(bytes)
    }

    /// What a pickled snapshot says about the last out-of-memory error of a device, as JSON.
    ///
    /// `allowed_bytes` is what PyTorch was allowed to hold, where that is known. No code in the pickle is run.
    #[pyfunction]
    #[pyo3(signature = (snapshot_pickle, device, allowed_bytes=None))]
    fn out_of_memory(
        py: Python<'_>,
        snapshot_pickle: &[u8],
        device: usize,
        allowed_bytes: Option<u64>,
    ) -> PyResult<String> {
        py.detach(|| unhand_cli::out_of_memory(snapshot_pickle, device, allowed_bytes))
            .map_err(PyValueError::new_err)
    }

    /// What the recorded history of one device did, as JSON: peaks and ends of requested, allocated and reserved bytes,
    /// and whether every segment event came out as recorded. The figures are those of `unhand replay --json`.
    ///
    /// Takes a pickle of what `torch.cuda.memory._snapshot()` returns. No code in it is run.
    #[pyfunction]
    fn replay(py: Python<'_>, snapshot_pickle: &[u8], device: usize) -> PyResult<String> {
        py.detach(|| crate::replay::recorded(snapshot_pickle, device)).map_err(PyValueError::new_err)
    }

    /// What of the cache can be given back, per device, as JSON: `{"devices": [{"device": 0, "cache": {…}}]}`.
    ///
    /// Takes a pickle of what `torch.cuda.memory._snapshot()` returns; segments and settings are enough. No code in
    /// it is run.
    #[pyfunction]
    fn cache(py: Python<'_>, snapshot_pickle: &[u8]) -> PyResult<String> {
        py.detach(|| crate::cache::caches(snapshot_pickle)).map_err(PyValueError::new_err)
    }
}
