//! The runtime about memory: allocations, pinned memory, copies, fills, pools.
#![allow(unsafe_code, reason = "unmaps pinned memory that the program gave back")]

use std::ffi::{c_int, c_uint};

use super::entries;
use crate::code::{Code, Outcome};
use crate::gpu::copy::submit;
use crate::gpu::graph::Work;
use crate::gpu::host::Origin;
use crate::gpu::{current_device, gpu};
use crate::pointers::Out;
use crate::sys;

/// What `cudaPointerGetAttributes` tells. CUDA 13 added reserved words, which are left as they are.
#[repr(C)]
struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: u64,
    host_pointer: u64,
}

/// Sixty-four bytes that C passes by value.
#[repr(C)]
struct IpcHandle {
    words: [u64; 8],
}

const UNREGISTERED: c_int = 0;
const HOST: c_int = 1;
const DEVICE: c_int = 2;
const MANAGED: c_int = 3;

entries! { runtime:
    fn cudaMalloc(address: Out<u64>, bytes: usize) {
        malloc(address, bytes)
    }
    fn cudaFree(address: u64) {
        free(address)
    }
    fn cudaMallocAsync(address: Out<u64>, bytes: usize, stream: u64) {
        let captured = gpu().enqueue(stream, Work::Empty)?.is_none();
        if captured { Err(Code::NOT_SUPPORTED) } else { allocate(address, bytes) }
    }
    fn cudaFreeAsync(address: u64, stream: u64) {
        let captured = gpu().enqueue(stream, Work::Empty)?.is_none();
        if captured { Err(Code::NOT_SUPPORTED) } else { release(address) }
    }
    fn cudaHostAlloc(address: Out<u64>, bytes: usize, _flags: c_uint) {
        allocate_host(address, bytes, Origin::Allocated)
    }
    fn cudaMallocHost(address: Out<u64>, bytes: usize) {
        allocate_host(address, bytes, Origin::Allocated)
    }
    fn cudaMallocManaged(address: Out<u64>, bytes: usize, _flags: c_uint) {
        allocate_host(address, bytes, Origin::Managed)
    }
    fn cudaFreeHost(address: u64) {
        free_host(address)
    }
    fn cudaHostRegister(address: u64, bytes: usize, _flags: c_uint) {
        let mut gpu = gpu();
        gpu.unsafe_call()?;
        gpu.current()?;
        gpu.host.register(address, bytes as u64, current_device())
    }
    fn cudaHostUnregister(address: u64) {
        let mut gpu = gpu();
        gpu.unsafe_call()?;
        gpu.host.unregister(address)
    }
    fn cudaHostGetDevicePointer(device: Out<u64>, address: u64, _flags: c_uint) {
        gpu().host.find(address).ok_or(Code::INVALID_VALUE)?;
        device.set(address)
    }
    fn cudaPointerGetAttributes(attributes: Out<PointerAttributes>, address: u64) {
        attributes.set(describe(address))
    }
    fn cudaMemcpy(target: u64, source: u64, bytes: usize, _kind: c_int) {
        gpu().unsafe_call()?;
        submit(0, copy(target, source, bytes))
    }
    fn cudaMemcpyAsync(target: u64, source: u64, bytes: usize, _kind: c_int, stream: u64) {
        submit(stream, copy(target, source, bytes))
    }
    fn cudaMemcpyPeer(target: u64, _to: c_int, source: u64, _from: c_int, bytes: usize) {
        submit(0, copy(target, source, bytes))
    }
    fn cudaMemcpyPeerAsync(target: u64, _to: c_int, source: u64, _from: c_int, bytes: usize, stream: u64) {
        submit(stream, copy(target, source, bytes))
    }
    fn cudaMemcpy2D(
        target: u64,
        target_pitch: usize,
        source: u64,
        source_pitch: usize,
        bytes: usize,
        n_rows: usize,
        _kind: c_int,
    ) {
        gpu().unsafe_call()?;
        submit(0, copy_rows(target, target_pitch, source, source_pitch, bytes, n_rows))
    }
    fn cudaMemcpy2DAsync(
        target: u64,
        target_pitch: usize,
        source: u64,
        source_pitch: usize,
        bytes: usize,
        n_rows: usize,
        _kind: c_int,
        stream: u64,
    ) {
        submit(stream, copy_rows(target, target_pitch, source, source_pitch, bytes, n_rows))
    }
    fn cudaMemset(target: u64, value: c_int, bytes: usize) {
        gpu().unsafe_call()?;
        submit(0, fill(target, value, bytes))
    }
    fn cudaMemsetAsync(target: u64, value: c_int, bytes: usize, stream: u64) {
        submit(stream, fill(target, value, bytes))
    }
    fn cudaMemcpyToSymbol(variable: u64, source: u64, bytes: usize, offset: usize, _kind: c_int) {
        let target = variable_range(variable, bytes, offset)?;
        submit(0, copy(target, source, bytes))
    }
    fn cudaMemcpyFromSymbol(target: u64, variable: u64, bytes: usize, offset: usize, _kind: c_int) {
        let source = variable_range(variable, bytes, offset)?;
        submit(0, copy(target, source, bytes))
    }
    fn cudaGetSymbolAddress(address: Out<u64>, variable: u64) {
        address.set(gpu().kernels.variable(variable)?.0)
    }
    fn cudaGetSymbolSize(bytes: Out<usize>, variable: u64) {
        let (_, size) = gpu().kernels.variable(variable)?;
        bytes.set(usize::try_from(size).unwrap_or(usize::MAX))
    }
    fn cudaDeviceGetDefaultMemPool(pool: Out<u64>, device: c_int) {
        gpu().device(device)?;
        pool.set(pool_of(device))
    }
    fn cudaDeviceGetMemPool(pool: Out<u64>, device: c_int) {
        gpu().device(device)?;
        pool.set(pool_of(device))
    }
    fn cudaMemPoolGetAttribute(pool: u64, _attribute: c_int, value: Out<u64>) {
        // The pool keeps nothing: what it has reserved is what is in use.
        let device = c_int::try_from(pool.wrapping_sub(POOLS)).map_err(|_| Code::INVALID_VALUE)?;
        let mut gpu = gpu();
        let device = gpu.device(device)?;
        value.set(device.plain_bytes())
    }
    fn cudaMemPoolSetAttribute(_pool: u64, _attribute: c_int, _value: u64) {
        Ok(())
    }
    fn cudaMemPoolSetAccess(_pool: u64, _descriptions: u64, _count: usize) {
        Ok(())
    }
    fn cudaMemPoolTrimTo(_pool: u64, _bytes: usize) {
        Ok(())
    }
    fn cudaDeviceGetGraphMemAttribute(_device: c_int, _attribute: c_int, value: Out<u64>) {
        // No graph has memory of its own here.
        value.set(0)
    }
    fn cudaDeviceSetGraphMemAttribute(_device: c_int, _attribute: c_int, _value: u64) {
        Ok(())
    }
    fn cudaDeviceGraphMemTrim(_device: c_int) {
        Ok(())
    }
    // Memory of one process cannot be shown to another: there is no device that both see.
    fn cudaIpcGetMemHandle(_handle: u64, _address: u64) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaIpcOpenMemHandle(address: Out<u64>, _handle: IpcHandle, _flags: c_uint) {
        address.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaIpcCloseMemHandle(_address: u64) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaIpcGetEventHandle(_handle: u64, _event: u64) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaIpcOpenEventHandle(event: Out<u64>, _handle: IpcHandle) {
        event.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
}

/// Handles of pools: this plus the device's number.
const POOLS: u64 = 0x3000_0000;

fn pool_of(device: c_int) -> u64 {
    POOLS + u64::try_from(device).unwrap_or(0)
}

/// Memory, refused while a capture forbids it.
pub(super) fn malloc(address: Out<u64>, bytes: usize) -> Outcome {
    gpu().unsafe_call()?;
    allocate(address, bytes)
}

fn allocate(address: Out<u64>, bytes: usize) -> Outcome {
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return address.set(0);
    }
    let allocated = gpu().current()?.malloc(bytes as u64);
    address.set(*allocated.as_ref().unwrap_or(&0))?;
    allocated.map(drop)
}

/// Gives memory back, and waits for the device, as `cudaFree` does.
pub(super) fn free(address: u64) -> Outcome {
    let mut gpu = gpu();
    gpu.unsafe_call()?;
    // Whose memory it is does not matter: the caller's device gets a context, which is what `cudaFree(0)` is used for.
    gpu.current()?;
    if address == 0 {
        return Ok(());
    }
    let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
    gpu.streams.wait_for_device(c_int::try_from(device).unwrap_or(0));
    gpu.devices[device].free(address)
}

fn release(address: u64) -> Outcome {
    let mut gpu = gpu();
    let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
    gpu.devices[device].free(address)
}

pub(super) fn allocate_host(address: Out<u64>, bytes: usize, origin: Origin) -> Outcome {
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let mut gpu = gpu();
    gpu.unsafe_call()?;
    gpu.current()?;
    if bytes == 0 {
        return address.set(0);
    }
    address.set(gpu.host.allocate(bytes as u64, origin, current_device())?)
}

pub(super) fn free_host(address: u64) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    let range = {
        let mut gpu = gpu();
        gpu.unsafe_call()?;
        gpu.host.take(address)?
    };
    // SAFETY: the range was mapped by `allocate` and just left the list; the program says it is done with it.
    unsafe { sys::free_host(range.start, range.bytes) };
    Ok(())
}

fn describe(address: u64) -> PointerAttributes {
    let gpu = gpu();
    let nothing = PointerAttributes { kind: UNREGISTERED, device: -2, device_pointer: 0, host_pointer: 0 };
    if let Some(device) = gpu.device_of(address) {
        if gpu.devices[device].range_of(address).is_none() {
            return nothing;
        }
        let device = c_int::try_from(device).unwrap_or(0);
        return PointerAttributes { kind: DEVICE, device, device_pointer: address, host_pointer: 0 };
    }
    match gpu.host.find(address) {
        Some(range) => PointerAttributes {
            kind: if range.origin == Origin::Managed { MANAGED } else { HOST },
            device: range.device,
            device_pointer: address,
            host_pointer: address,
        },
        // CUDA leaves the host pointer there for memory it does not know.
        None => PointerAttributes { host_pointer: address, ..nothing },
    }
}

fn copy(target: u64, source: u64, bytes: usize) -> Work {
    Work::Copy { target, source, bytes: bytes as u64 }
}

fn copy_rows(
    target: u64,
    target_pitch: usize,
    source: u64,
    source_pitch: usize,
    bytes: usize,
    n_rows: usize,
) -> Work {
    Work::CopyRows {
        target,
        target_pitch: target_pitch as u64,
        source,
        source_pitch: source_pitch as u64,
        bytes: bytes as u64,
        n_rows: n_rows as u64,
    }
}

fn fill(target: u64, value: c_int, bytes: usize) -> Work {
    Work::Fill { target, pattern: value.cast_unsigned(), width: 1, count: bytes as u64 }
}

fn variable_range(variable: u64, bytes: usize, offset: usize) -> Result<u64, Code> {
    let (address, size) = gpu().kernels.variable(variable)?;
    let end = (bytes as u64).checked_add(offset as u64).ok_or(Code::INVALID_VALUE)?;
    if end > size { Err(Code::INVALID_VALUE) } else { Ok(address + offset as u64) }
}
