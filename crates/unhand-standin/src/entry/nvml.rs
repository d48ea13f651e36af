//! The management library about the same devices: names, memory, who uses it.

use std::ffi::{c_char, c_int, c_uint};

use super::{answers, entries};
use crate::code::{Code, Outcome};
use crate::gpu::properties::{pci_bus_id, uuid};
use crate::gpu::{config, gpu};
use crate::pointers::{Out, Text};

const INVALID_ARGUMENT: Code = Code(2);
const NOT_SUPPORTED: Code = Code(3);
const NOT_FOUND: Code = Code(6);
/// Handles of devices: this plus the number.
const DEVICES: u64 = 0x5000_0000;

/// `nvmlMemory_t`
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
struct MemoryWithReserve {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`
#[repr(C)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlUtilization_t`
#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

entries! { plain:
    fn nvmlInit() {
        Ok(())
    }
    fn nvmlInit_v2() {
        Ok(())
    }
    fn nvmlInitWithFlags(_flags: c_uint) {
        Ok(())
    }
    fn nvmlShutdown() {
        Ok(())
    }
    fn nvmlSystemGetDriverVersion(text: Out<c_char>, room: c_uint) {
        text.set_text("580.00 (unhand stand-in)", room as usize)
    }
    fn nvmlSystemGetNVMLVersion(text: Out<c_char>, room: c_uint) {
        text.set_text("13.580.00", room as usize)
    }
    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) {
        version.set(config().cuda_version.max(13_000))
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) {
        version.set(config().cuda_version.max(13_000))
    }
    fn nvmlDeviceGetCount(count: Out<c_uint>) {
        count.set(c_uint::try_from(gpu().devices.len()).unwrap_or(0))
    }
    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) {
        count.set(c_uint::try_from(gpu().devices.len()).unwrap_or(0))
    }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: Out<u64>) {
        by_index(device, index)
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<u64>) {
        by_index(device, index)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(text: Text, device: Out<u64>) {
        let text = text.get().ok_or(INVALID_ARGUMENT)?.to_string_lossy().to_uppercase();
        // NVML writes the domain with eight digits, CUDA with four; both are accepted.
        let found = (0..gpu().devices.len()).find(|index| text.ends_with(pci_bus_id(*index).as_str()));
        device.set(DEVICES + found.ok_or(NOT_FOUND)? as u64)
    }
    fn nvmlDeviceGetHandleByUUID(text: Text, device: Out<u64>) {
        let text = text.get().ok_or(INVALID_ARGUMENT)?.to_string_lossy().into_owned();
        let found = (0..gpu().devices.len()).find(|index| uuid_text(*index) == text);
        device.set(DEVICES + found.ok_or(NOT_FOUND)? as u64)
    }
    fn nvmlDeviceGetIndex(device: u64, index: Out<c_uint>) {
        index.set(c_uint::try_from(index_of(device)?).unwrap_or(0))
    }
    fn nvmlDeviceGetName(device: u64, text: Out<c_char>, room: c_uint) {
        index_of(device)?;
        text.set_text(config().profile.device_name, room as usize)
    }
    fn nvmlDeviceGetUUID(device: u64, text: Out<c_char>, room: c_uint) {
        text.set_text(&uuid_text(index_of(device)?), room as usize)
    }
    fn nvmlDeviceGetMinorNumber(device: u64, number: Out<c_uint>) {
        number.set(c_uint::try_from(index_of(device)?).unwrap_or(0))
    }
    fn nvmlDeviceGetCudaComputeCapability(device: u64, major: Out<c_int>, minor: Out<c_int>) {
        index_of(device)?;
        let (first, second) = config().profile.capability;
        major.set(first)?;
        minor.set(second)
    }
    fn nvmlDeviceGetMemoryInfo(device: u64, memory: Out<Memory>) {
        let (total, free) = memory_of(device)?;
        memory.set(Memory { total, free, used: total - free })
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: u64, memory: Out<MemoryWithReserve>) {
        let (total, free) = memory_of(device)?;
        let version = memory.cast::<c_uint>().get()?;
        memory.set(MemoryWithReserve { version, total, reserved: 0, free, used: total - free })
    }
    fn nvmlDeviceGetComputeRunningProcesses(device: u64, count: Out<c_uint>, processes: Out<Process>) {
        processes_of(device, count, processes)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: u64, count: Out<c_uint>, processes: Out<Process>) {
        processes_of(device, count, processes)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: u64, count: Out<c_uint>, _processes: u64) {
        index_of(device)?;
        count.set(0)
    }
    fn nvmlDeviceGetUtilizationRates(device: u64, rates: Out<Utilization>) {
        index_of(device)?;
        rates.set(Utilization { gpu: 0, memory: 0 })
    }
    // What a device that is not there does not have.
    fn nvmlDeviceGetTemperature(_device: u64, _sensor: c_int, value: Out<c_uint>) {
        value.set(0)?;
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetPowerUsage(_device: u64, value: Out<c_uint>) {
        value.set(0)?;
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetNvLinkState(_device: u64, _link: c_uint, value: Out<c_uint>) {
        value.set(0)?;
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(_device: u64, _link: c_uint, value: Out<c_uint>) {
        value.set(0)?;
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_device: u64, _link: c_uint, _info: u64) {
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetGpuFabricInfoV(_device: u64, _info: u64) {
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetP2PStatus(_first: u64, _second: u64, _kind: c_int, status: Out<c_int>) {
        status.set(0)
    }
}

answers! {
    fn nvmlErrorString(error: c_int) -> *const c_char {
        let text = match error {
            0 => c"Success",
            2 => c"Invalid Argument",
            3 => c"Not Supported",
            6 => c"Not Found",
            7 => c"Insufficient Size",
            _ => c"Unknown Error",
        };
        text.as_ptr()
    }
}

fn by_index(device: Out<u64>, index: c_uint) -> Outcome {
    if index as usize >= gpu().devices.len() {
        return Err(INVALID_ARGUMENT);
    }
    device.set(DEVICES + u64::from(index))
}

fn index_of(device: u64) -> Result<usize, Code> {
    let index = device.checked_sub(DEVICES).and_then(|index| usize::try_from(index).ok());
    index.filter(|index| *index < gpu().devices.len()).ok_or(INVALID_ARGUMENT)
}

fn memory_of(device: u64) -> Result<(u64, u64), Code> {
    let index = index_of(device)?;
    let gpu = gpu();
    Ok((gpu.devices[index].memory_bytes, gpu.devices[index].free_bytes()))
}

/// `GPU-` and the bytes of the identifier, as NVML writes them.
fn uuid_text(index: usize) -> String {
    let hex: Vec<String> = uuid(index).iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16))
}

/// Only this process uses the devices, and only those on which it has a context.
fn processes_of(device: u64, count: Out<c_uint>, processes: Out<Process>) -> Outcome {
    let index = index_of(device)?;
    if !gpu().devices[index].has_context() {
        return count.set(0);
    }
    let room = count.get()?;
    count.set(1)?;
    if room == 0 {
        return Err(Code(7));
    }
    let used = gpu().devices[index].held_bytes();
    processes.set(Process {
        pid: std::process::id(),
        used,
        gpu_instance: c_uint::MAX,
        compute_instance: c_uint::MAX,
    })
}
