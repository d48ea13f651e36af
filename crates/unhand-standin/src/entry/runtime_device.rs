//! The runtime about devices, versions and errors.

use std::ffi::{c_char, c_int, c_uint};

use super::{answers, entries, last_error};
use crate::code::{self, Code};
use crate::gpu::properties::{attribute, device_properties, pci_bus_id};
use crate::gpu::{config, current_device, gpu, set_current_device};
use crate::pointers::{Out, Text};

/// The driver is as new as the runtime, or a little newer, as on a machine that is kept up.
fn driver_version() -> c_int {
    config().cuda_version.max(13_000)
}

entries! { runtime:
    fn cudaGetDeviceCount(count: Out<c_int>) {
        let n_devices = gpu().devices.len();
        if n_devices == 0 {
            count.set(0)?;
            return Err(Code(100));
        }
        count.set(c_int::try_from(n_devices).unwrap_or(c_int::MAX))
    }
    fn cudaGetDevice(device: Out<c_int>) {
        device.set(current_device())
    }
    fn cudaSetDevice(device: c_int) {
        set_current_device(device)
    }
    fn cudaGetDeviceProperties(properties: Out<u8>, device: c_int) {
        write_properties(properties, device)
    }
    fn cudaGetDeviceProperties_v2(properties: Out<u8>, device: c_int) {
        write_properties(properties, device)
    }
    fn cudaDeviceGetAttribute(value: Out<c_int>, number: c_int, device: c_int) {
        gpu().device(device)?;
        let index = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        value.set(attribute(config().profile, number, index).ok_or(Code::INVALID_VALUE)?)
    }
    fn cudaDeviceGetPCIBusId(text: Out<c_char>, room: c_int, device: c_int) {
        gpu().device(device)?;
        let index = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        text.set_text(&pci_bus_id(index), usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?)
    }
    fn cudaDeviceGetByPCIBusId(device: Out<c_int>, text: Text) {
        let text = text.get().ok_or(Code::INVALID_VALUE)?.to_string_lossy().to_uppercase();
        let found = (0..gpu().devices.len()).find(|index| pci_bus_id(*index) == text);
        device.set(found.and_then(|index| c_int::try_from(index).ok()).ok_or(Code::INVALID_VALUE)?)
    }
    fn cudaDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        least.set_if_asked(0);
        greatest.set_if_asked(-5);
        Ok(())
    }
    fn cudaDeviceCanAccessPeer(answer: Out<c_int>, device: c_int, peer: c_int) {
        let mut gpu = gpu();
        gpu.device(device)?;
        gpu.device(peer)?;
        answer.set(c_int::from(device != peer))
    }
    fn cudaDeviceEnablePeerAccess(peer: c_int, _flags: c_uint) {
        gpu().device(peer).map(drop)
    }
    fn cudaDeviceDisablePeerAccess(peer: c_int) {
        gpu().device(peer).map(drop)
    }
    fn cudaDeviceSynchronize() {
        let mut gpu = gpu();
        gpu.unsafe_call()?;
        gpu.current()?;
        gpu.streams.wait_for_device(current_device());
        Ok(())
    }
    fn cudaDeviceReset() {
        Ok(())
    }
    fn cudaDeviceSetLimit(_limit: c_int, _value: usize) {
        Ok(())
    }
    fn cudaDeviceGetLimit(value: Out<usize>, limit: c_int) {
        // Stack, printf buffer, heap of a kernel: what a fresh context has.
        value.set(match limit {
            0 => 1024,
            1 => 1 << 20,
            2 => 8 << 20,
            _ => 0,
        })
    }
    fn cudaSetDeviceFlags(_flags: c_uint) {
        Ok(())
    }
    fn cudaDriverGetVersion(version: Out<c_int>) {
        version.set(driver_version())
    }
    fn cudaRuntimeGetVersion(version: Out<c_int>) {
        version.set(config().cuda_version)
    }
    fn cudaProfilerStart() {
        Ok(())
    }
    fn cudaProfilerStop() {
        Ok(())
    }
    fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) {
        let mut gpu = gpu();
        let device = gpu.current()?;
        free.set_if_asked(usize::try_from(device.free_bytes()).unwrap_or(usize::MAX));
        total.set_if_asked(usize::try_from(device.memory_bytes).unwrap_or(usize::MAX));
        Ok(())
    }
}

answers! {
    fn cudaGetLastError() -> c_int {
        last_error(true)
    }
    fn cudaPeekAtLastError() -> c_int {
        last_error(false)
    }
    fn cudaGetErrorString(error: c_int) -> *const c_char {
        code::meaning(error).as_ptr()
    }
    fn cudaGetErrorName(error: c_int) -> *const c_char {
        code::runtime_name(error).as_ptr()
    }
}

fn write_properties(properties: Out<u8>, device: c_int) -> code::Outcome {
    let memory_bytes = gpu().device(device)?.memory_bytes;
    let index = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    let bytes = device_properties(config().profile, memory_bytes, index, config().cuda_major());
    for (offset, byte) in bytes.into_iter().enumerate() {
        properties.at(offset).set(byte)?;
    }
    Ok(())
}
