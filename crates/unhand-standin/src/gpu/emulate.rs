//! What a handful of PyTorch's kernels do, computed on the host: those whose results programs branch on.
//!
//! A kernel is known by its mangled name, and its arguments by what the name says they are. Values are computed for
//! small tensors only (see [`VALUES`](crate::config::VALUES)); everything else about a kernel is that it was
//! launched. Where the inputs of a known kernel were never computed, its result is as meaningless as they are, but
//! it is a result: a count is at most the number of elements, a truth value is 0 or 1.
#![allow(unsafe_code, reason = "reads the arguments of kernels and computes in device memory")]

mod elementwise;
mod reduce;
mod select;
mod steps;
mod values;

use std::ffi::CStr;

use super::{config, gpu};
use crate::pointers::In;
use crate::sys;
pub(crate) use elementwise::Elementwise;
pub(crate) use reduce::Reduce;
pub(crate) use select::Select;
pub(crate) use steps::Steps;
use values::Type;

/// What a launch does to memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Effect {
    /// One result for each element.
    Elementwise(Elementwise),
    /// One result for many elements.
    Reduce(Reduce),
    /// Which elements are not zero, or how many.
    Select(Select),
    /// Counters that go on.
    Steps(Steps),
    /// Zeros where the real value is not computed, but somebody looks at it.
    Zero(Vec<(u64, u64)>),
}

/// What a launch of a kernel with these arguments does, if we know.
pub(crate) fn effect(name: &CStr, arguments: u64, n_blocks: u64) -> Option<Effect> {
    if config().values_bytes == 0 || arguments == 0 {
        return None;
    }
    let name = name.to_str().ok()?;
    let arguments = Arguments(arguments);
    // PyTorch's own kernels, and those of the library that it builds into a namespace of its own. Nobody else's
    // layouts are known.
    if !name.contains("2at6native") && !name.contains("14at_cuda_detail") {
        return None;
    }
    if let Some((_, rest)) = name.split_once("nll_loss_forward_reduce_cuda_kernel_") {
        // Output, then total weight: the loss of most language models. After the number of dimensions comes the type.
        let (kind, _) = Type::mangled(rest.get(3..)?)?;
        let places =
            [0, 1].into_iter().filter_map(|index| arguments.word(index, 0)).filter(|place| *place != 0);
        return Some(Effect::Zero(places.map(|place| (place, kind.bytes())).collect()));
    }
    None.or_else(|| elementwise::parse(name, &arguments).map(Effect::Elementwise))
        .or_else(|| select::parse(name, &arguments, n_blocks).map(Effect::Select))
        .or_else(|| steps::parse(name, &arguments, n_blocks).map(Effect::Steps))
        .or_else(|| reduce::parse(name, &arguments))
}

impl Effect {
    /// Does it. What is not live, or too large, is left as it was.
    pub(crate) fn apply(&self) {
        match self {
            Effect::Elementwise(work) => work.apply(),
            Effect::Reduce(work) => work.apply(),
            Effect::Select(work) => work.apply(),
            Effect::Steps(work) => work.apply(),
            Effect::Zero(places) => {
                for (address, bytes) in places {
                    if let Some(mut memory) = Memory::new(*address, *bytes) {
                        memory.write(0, &vec![0; usize::try_from(*bytes).unwrap_or(0)]);
                    }
                }
            }
        }
    }
}

/// The arguments of a launch: an array of addresses of values.
pub(crate) struct Arguments(u64);

impl Arguments {
    /// A value inside the `index`-th argument. The caller takes index and offset from the kernel's name, which is
    /// what makes reading there right.
    fn read<T: Copy>(&self, index: u64, offset: u64) -> Option<T> {
        // SAFETY: the compiler's launch code passes an array with an address for each parameter the name lists.
        let address = unsafe { In::<u64>::from_address(self.0 + index * 8) }.get().ok()?;
        if address == 0 {
            return None;
        }
        // SAFETY: the parameter's value lies there for the length of the call, and is at least as long as the
        // type that the name gives it.
        unsafe { In::<T>::from_address(address + offset) }.get().ok()
    }

    fn word(&self, index: u64, offset: u64) -> Option<u64> {
        self.read(index, offset)
    }

    fn int(&self, index: u64, offset: u64) -> Option<i32> {
        self.read(index, offset)
    }
}

/// A range of device memory that is live, and small enough to compute with.
pub(crate) struct Memory {
    address: u64,
    bytes: u64,
}

impl Memory {
    /// Refuses what no device has, and what is larger than values are computed for.
    pub(crate) fn new(address: u64, bytes: u64) -> Option<Memory> {
        let is_small = bytes <= config().values_bytes;
        (is_small && Memory::is_live(address, bytes)).then_some(Memory { address, bytes })
    }

    /// Whether a device has all of it.
    pub(crate) fn is_live(address: u64, bytes: u64) -> bool {
        let gpu = gpu();
        gpu.device_of(address).is_some_and(|device| gpu.devices[device].is_live(address, bytes.max(1)))
    }

    /// Bytes at an offset; zeros for what would be outside.
    pub(crate) fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        if offset.checked_add(N as u64).is_some_and(|end| end <= self.bytes) {
            // SAFETY: the range was live when the work began, and a program that frees memory under a running
            // kernel has no claim to a result; `bytes` is ours.
            unsafe { sys::copy(bytes.as_mut_ptr() as u64, self.address + offset, N as u64) };
        }
        bytes
    }

    /// Writes bytes at an offset; nothing if they would go outside.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let n_bytes = bytes.len() as u64;
        if offset.checked_add(n_bytes).is_some_and(|end| end <= self.bytes) {
            // SAFETY: as in `read`.
            unsafe { sys::copy(self.address + offset, bytes.as_ptr() as u64, n_bytes) };
        }
    }
}
