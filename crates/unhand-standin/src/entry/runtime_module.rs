//! The runtime about code loaded at run time, and the ways to the driver's functions by name.

use std::ffi::{CString, c_int, c_uint};

use super::entries;
use crate::code::{Code, Outcome};
use crate::gpu::{gpu, log};
use crate::pointers::{Out, Text};
use crate::sys;

entries! { runtime:
    fn cudaLibraryLoadData(
        library: Out<u64>,
        _code: u64,
        _jit_options: u64,
        _jit_values: u64,
        _n_jit: c_uint,
        _options: u64,
        _values: u64,
        _n_options: c_uint,
    ) {
        library.set(gpu().kernels.handle())
    }
    fn cudaLibraryLoadFromFile(
        library: Out<u64>,
        _path: u64,
        _jit_options: u64,
        _jit_values: u64,
        _n_jit: c_uint,
        _options: u64,
        _values: u64,
        _n_options: c_uint,
    ) {
        library.set(gpu().kernels.handle())
    }
    fn cudaLibraryUnload(_library: u64) {
        Ok(())
    }
    fn cudaLibraryGetKernel(kernel: Out<u64>, _library: u64, _name: u64) {
        kernel.set(gpu().kernels.handle())
    }
    fn cudaLibraryGetKernelCount(count: Out<c_uint>, _library: u64) {
        // The code is not read, so nobody knows.
        count.set(0)
    }
    fn cudaLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, _library: u64, _name: u64) {
        address.set_if_asked(0);
        bytes.set_if_asked(0);
        Err(Code::NOT_FOUND)
    }
    fn cudaLibraryGetManaged(address: Out<u64>, bytes: Out<usize>, _library: u64, _name: u64) {
        address.set_if_asked(0);
        bytes.set_if_asked(0);
        Err(Code::NOT_FOUND)
    }
    fn cudaLibraryGetUnifiedFunction(address: Out<u64>, _library: u64, _name: u64) {
        address.set(0)?;
        Err(Code::NOT_FOUND)
    }
    fn cudaGetDriverEntryPoint(name: Text, function: Out<u64>, _flags: u64, status: Out<c_int>) {
        driver_function(&name, function, status)
    }
    fn cudaGetDriverEntryPointByVersion(
        name: Text,
        function: Out<u64>,
        _version: c_uint,
        _flags: u64,
        status: Out<c_int>,
    ) {
        driver_function(&name, function, status)
    }
    // Tables of functions that are in no header. Nobody asks who has not brought NVIDIA's own libraries along.
    fn cudaGetExportTable(table: Out<u64>, _id: u64) {
        log::missing("cudaGetExportTable");
        table.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
}

entries! { plain:
    fn cuGetProcAddress(name: Text, function: Out<u64>, _version: c_int, _flags: u64) {
        find(&name, function)
    }
    fn cuGetProcAddress_v2(name: Text, function: Out<u64>, _version: c_int, _flags: u64, status: Out<c_int>) {
        driver_function(&name, function, status)
    }
    fn cuGetExportTable(table: Out<u64>, _id: u64) {
        log::missing("cuGetExportTable");
        table.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
    /// Stands for every function of the driver that is not here.
    fn unhand_standin_not_supported() {
        Err(Code::NOT_SUPPORTED)
    }
    /// Changes the lag of events while a test runs.
    fn unhand_standin_set_lag(lag_us: u64) {
        gpu().streams.set_lag(lag_us);
        Ok(())
    }
}

fn driver_function(name: &Text, function: Out<u64>, status: Out<c_int>) -> Outcome {
    find(name, function)?;
    // Found, even if what was found refuses: PyTorch asks for all functions at once and takes one that is not
    // there for a driver that is too old.
    status.set_if_asked(0);
    Ok(())
}

/// A driver function by its name. If it is not here, the caller gets one that refuses.
fn find(name: &Text, function: Out<u64>) -> Outcome {
    let name = name.get().ok_or(Code::INVALID_VALUE)?.to_string_lossy().into_owned();
    // The header renames functions whose signature changed, the name asked for stays. Ours have the latest.
    for candidate in [format!("{name}_v2"), name.clone()] {
        let Ok(symbol) = CString::new(candidate) else { continue };
        let address = sys::symbol(&symbol);
        if address != 0 {
            return function.set(address);
        }
    }
    log::missing(&name);
    function.set(sys::symbol(c"unhand_standin_not_supported"))
}
