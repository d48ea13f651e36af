//! Memory of a device from NVML: the second form of the question, or the first where a driver is too old for it.
#![allow(unsafe_code, reason = "the crate behind it does not wrap the first form")]

use std::mem::MaybeUninit;

use nvml_wrapper::error::{NvmlError, nvml_try};

use crate::Memory;

/// What the driver says, as far as it does. Devices that share the host's memory (Jetson, GB10) say nothing.
pub(super) fn of(library: &nvml_wrapper::Nvml, device: &nvml_wrapper::Device<'_>) -> Memory {
    match device.memory_info() {
        Ok(memory) => Memory {
            total_bytes: Some(memory.total),
            used_bytes: Some(memory.used),
            free_bytes: Some(memory.free),
            reserved_bytes: Some(memory.reserved),
        },
        // Before driver 510.
        Err(NvmlError::FailedToLoadSymbol(_)) => first_form(library, device).unwrap_or_default(),
        Err(_) => Memory::default(),
    }
}

/// The first form counts the driver's own part as used.
fn first_form(library: &nvml_wrapper::Nvml, device: &nvml_wrapper::Device<'_>) -> Option<Memory> {
    let function = library.lib().nvmlDeviceGetMemoryInfo.as_ref().ok()?;
    let mut memory = MaybeUninit::uninit();
    // SAFETY: the handle is of the library that the function is of, which lives while `library` is borrowed.
    let handle = unsafe { device.handle() };
    // SAFETY: `memory` is a place for exactly the struct that the function's own type names.
    let code = unsafe { function(handle, memory.as_mut_ptr()) };
    nvml_try(code).ok()?;
    // SAFETY: NVML fills the struct whenever it returns success, which `nvml_try` has just seen.
    let memory = unsafe { memory.assume_init() };
    Some(Memory {
        total_bytes: Some(memory.total),
        used_bytes: Some(memory.used),
        free_bytes: Some(memory.free),
        reserved_bytes: None,
    })
}
