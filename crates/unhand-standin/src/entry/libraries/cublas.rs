//! cuBLAS and cuBLASLt: handles, modes, and a heuristic that has an answer.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::entry::{answers, entries};
use crate::gpu::{config, gpu};
use crate::pointers::Out;

/// What a handle remembers.
#[derive(Clone, Copy, Debug, Default)]
struct Handle {
    stream: u64,
    math_mode: c_int,
    pointer_mode: c_int,
    atomics_mode: c_int,
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const NOT_INITIALIZED: c_int = 1;

fn handles<T>(with: impl FnOnce(&mut HashMap<u64, Handle>) -> T) -> T {
    static HANDLES: OnceLock<Mutex<HashMap<u64, Handle>>> = OnceLock::new();
    with(&mut HANDLES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner))
}

fn of(handle: u64) -> Result<Handle, crate::code::Code> {
    handles(|handles| handles.get(&handle).copied()).ok_or(crate::code::Code(NOT_INITIALIZED))
}

fn change(handle: u64, with: impl FnOnce(&mut Handle)) -> crate::code::Outcome {
    handles(|handles| handles.get_mut(&handle).map(with)).ok_or(crate::code::Code(NOT_INITIALIZED))
}

entries! { plain:
    fn cublasCreate_v2(handle: Out<u64>) {
        let new = gpu().kernels.handle();
        handles(|handles| handles.insert(new, Handle::default()));
        handle.set(new)
    }
    fn cublasDestroy_v2(handle: u64) {
        handles(|handles| handles.remove(&handle));
        Ok(())
    }
    fn cublasGetVersion_v2(_handle: u64, version: Out<c_int>) {
        version.set(config().cuda_version / 10 * 100)
    }
    fn cublasSetStream_v2(handle: u64, stream: u64) {
        change(handle, |handle| handle.stream = stream)
    }
    fn cublasGetStream_v2(handle: u64, stream: Out<u64>) {
        stream.set(of(handle)?.stream)
    }
    fn cublasSetMathMode(handle: u64, mode: c_int) {
        change(handle, |handle| handle.math_mode = mode)
    }
    fn cublasGetMathMode(handle: u64, mode: Out<c_int>) {
        mode.set(of(handle)?.math_mode)
    }
    fn cublasSetPointerMode_v2(handle: u64, mode: c_int) {
        change(handle, |handle| handle.pointer_mode = mode)
    }
    fn cublasGetPointerMode_v2(handle: u64, mode: Out<c_int>) {
        mode.set(of(handle)?.pointer_mode)
    }
    fn cublasSetAtomicsMode(handle: u64, mode: c_int) {
        change(handle, |handle| handle.atomics_mode = mode)
    }
    fn cublasGetAtomicsMode(handle: u64, mode: Out<c_int>) {
        mode.set(of(handle)?.atomics_mode)
    }
    fn cublasLtMatmulAlgoGetHeuristic(
        _handle: u64,
        _operation: u64,
        _a: u64,
        _b: u64,
        _c: u64,
        _d: u64,
        _preference: u64,
        _n_wanted: c_int,
        results: Out<Heuristic>,
        n_found: Out<c_int>,
    ) {
        results.set(Heuristic { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 1.0, reserved: [0; 4] })?;
        n_found.set(1)
    }
}

answers! {
    fn cublasLtGetVersion() -> usize {
        usize::try_from(config().cuda_version / 10 * 100).unwrap_or(0)
    }
    fn cublasLtGetCudartVersion() -> usize {
        usize::try_from(config().cuda_version).unwrap_or(0)
    }
}
