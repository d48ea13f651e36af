//! The driver about memory: plain and virtual memory, pointer attributes, copies.

use std::ffi::{c_int, c_uint};

use super::entries;
use super::runtime_memory::{allocate_host, free, free_host, malloc};
use crate::code::{Code, Outcome};
use crate::gpu::copy::submit;
use crate::gpu::graph::Work;
use crate::gpu::host::Origin;
use crate::gpu::memory::GRAIN;
use crate::gpu::{current_device, gpu};
use crate::pointers::{In, Out};

/// The head of `CUmemAllocationProp`: kind of memory, kind of handle, where.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllocationProperties {
    kind: c_int,
    _handle_types: c_int,
    location_kind: c_int,
    device: c_int,
    unused: u64,
    flags: u64,
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
struct AccessDescription {
    location_kind: c_int,
    device: c_int,
    /// 0 none, 1 read, 3 read and write.
    access: c_int,
}

const ON_DEVICE: c_int = 1;

entries! { plain:
    fn cuMemGetInfo_v2(free_bytes: Out<usize>, total_bytes: Out<usize>) {
        let mut gpu = gpu();
        let device = gpu.current()?;
        free_bytes.set_if_asked(usize::try_from(device.free_bytes()).unwrap_or(usize::MAX));
        total_bytes.set_if_asked(usize::try_from(device.memory_bytes).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        malloc(address, bytes)
    }
    fn cuMemFree_v2(address: u64) {
        free(address)
    }
    fn cuMemHostAlloc(address: Out<u64>, bytes: usize, _flags: c_uint) {
        allocate_host(address, bytes, Origin::Allocated)
    }
    fn cuMemAllocHost_v2(address: Out<u64>, bytes: usize) {
        allocate_host(address, bytes, Origin::Allocated)
    }
    fn cuMemFreeHost(address: u64) {
        free_host(address)
    }
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, _properties: u64, _option: c_int) {
        bytes.set(usize::try_from(GRAIN).unwrap_or(usize::MAX))
    }
    fn cuMemAddressReserve(address: Out<u64>, bytes: usize, _align: usize, _wish: u64, _flags: u64) {
        address.set(gpu().current()?.reserve(bytes as u64)?)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        let mut gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        gpu.devices[device].release_reservation(address, bytes as u64)
    }
    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<AllocationProperties>, _flags: u64) {
        let properties = properties.get()?;
        if properties.location_kind != ON_DEVICE {
            return Err(Code::NOT_SUPPORTED);
        }
        // Kinds of handles to export are accepted, as PyTorch asks for one whether or not it will export; an
        // export is refused.
        let mut gpu = gpu();
        gpu.device(properties.device)?;
        let index = usize::try_from(properties.device).map_err(|_| Code::INVALID_DEVICE)?;
        let gpu = &mut *gpu;
        handle.set(gpu.physical.create(&mut gpu.devices[index], index, bytes as u64)?)
    }
    fn cuMemRelease(handle: u64) {
        let mut gpu = gpu();
        let gpu = &mut *gpu;
        let device = gpu.physical.device_of(handle)?;
        gpu.physical.release(&mut gpu.devices[device], handle)
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        if offset != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        let gpu = &mut *gpu;
        gpu.devices[device].map(address, bytes as u64, handle, &mut gpu.physical)
    }
    fn cuMemUnmap(address: u64, bytes: usize) {
        let mut gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        let gpu = &mut *gpu;
        for handle in gpu.devices[device].unmap(address, bytes as u64)? {
            // Memory of one device may have been mapped into another's addresses.
            let owner = gpu.physical.device_of(handle)?;
            gpu.physical.unmapped(&mut gpu.devices[owner], handle);
        }
        Ok(())
    }
    fn cuMemSetAccess(address: u64, bytes: usize, descriptions: In<AccessDescription>, count: usize) {
        let mut gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        for index in 0..count {
            let description = descriptions.at(index).get()?;
            // All devices are the host here: whoever may read may write, from everywhere.
            let is_own = usize::try_from(description.device) == Ok(device);
            if description.access != 0 || is_own {
                gpu.devices[device].set_access(address, bytes as u64, description.access != 0)?;
            }
        }
        Ok(())
    }
    fn cuMemGetAccess(access: Out<u64>, _location: u64, address: u64) {
        let gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        access.set(if gpu.devices[device].is_live(address, 1) { 3 } else { 0 })
    }
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        let mut gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        let found = gpu.devices[device].handle_at(address).ok_or(Code::INVALID_VALUE)?;
        gpu.physical.retain(found)?;
        handle.set(found)
    }
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: u64) {
        let device = gpu().physical.device_of(handle)?;
        let device = c_int::try_from(device).unwrap_or(0);
        properties.set(AllocationProperties {
            kind: 1,
            _handle_types: 0,
            location_kind: ON_DEVICE,
            device,
            unused: 0,
            flags: 0,
        })
    }
    fn cuMemExportToShareableHandle(_shared: u64, _handle: u64, _kind: c_int, _flags: u64) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cuMemImportFromShareableHandle(handle: Out<u64>, _shared: u64, _kind: c_int) {
        handle.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
    fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, address: u64) {
        let gpu = gpu();
        let device = gpu.device_of(address).ok_or(Code::INVALID_VALUE)?;
        let (first, size) = gpu.devices[device].range_of(address).ok_or(Code::INVALID_VALUE)?;
        start.set_if_asked(first);
        bytes.set_if_asked(usize::try_from(size).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuPointerGetAttribute(value: Out<u64>, number: c_int, address: u64) {
        pointer_attribute(value, number, address)
    }
    fn cuMemsetD8Async(target: u64, value: u8, count: usize, stream: u64) {
        submit(stream, Work::Fill { target, pattern: u32::from(value), width: 1, count: count as u64 })
    }
    fn cuMemsetD32Async(target: u64, value: c_uint, count: usize, stream: u64) {
        submit(stream, Work::Fill { target, pattern: value, width: 4, count: count as u64 })
    }
    fn cuMemcpyAsync(target: u64, source: u64, bytes: usize, stream: u64) {
        submit(stream, Work::Copy { target, source, bytes: bytes as u64 })
    }
    fn cuMemcpyHtoDAsync_v2(target: u64, source: u64, bytes: usize, stream: u64) {
        submit(stream, Work::Copy { target, source, bytes: bytes as u64 })
    }
    fn cuMemcpyDtoHAsync_v2(target: u64, source: u64, bytes: usize, stream: u64) {
        submit(stream, Work::Copy { target, source, bytes: bytes as u64 })
    }
    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, stream: u64) {
        submit(stream, Work::Copy { target, source, bytes: bytes as u64 })
    }
}

fn pointer_attribute(value: Out<u64>, number: c_int, address: u64) -> Outcome {
    let gpu = gpu();
    let device = gpu.device_of(address).filter(|device| gpu.devices[*device].range_of(address).is_some());
    let host = gpu.host.find(address);
    if device.is_none() && host.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    let ordinal = device.map_or(current_device(), |device| c_int::try_from(device).unwrap_or(0));
    match number {
        // Context; all contexts are primary.
        1 => value.set(0x2000_0000 + u64::try_from(ordinal).unwrap_or(0)),
        // Kind of memory: 1 host, 2 device.
        2 => value.cast::<c_int>().set(if device.is_some() { 2 } else { 1 }),
        // The address for the device, and for the host.
        3 => value.set(address),
        4 if device.is_none() => value.set(address),
        // Whether copies with it are synchronous.
        6 => value.cast::<c_int>().set(0),
        // An id of the allocation: its first byte is one.
        7 => {
            let range = device.and_then(|device| gpu.devices[device].range_of(address));
            value.set(range.map_or(address, |(start, _)| start))
        }
        // Managed memory; the device's number; start and size of the range.
        8 => {
            value.cast::<c_int>().set(c_int::from(host.is_some_and(|range| range.origin == Origin::Managed)))
        }
        9 => value.cast::<c_int>().set(ordinal),
        11 | 12 => {
            let range = device.and_then(|device| gpu.devices[device].range_of(address));
            let (start, bytes) =
                range.or(host.map(|range| (range.start, range.bytes))).unwrap_or((address, 0));
            value.set(if number == 11 { start } else { bytes })
        }
        _ => Err(Code::NOT_SUPPORTED),
    }
}
