//! Does work: copies, fills, functions of the program, and what we know of kernels.
#![allow(unsafe_code, reason = "moves bytes between addresses that a C program passed")]

use super::graph::Work;
use super::{Gpu, config, gpu};
use crate::code::{Code, Outcome};
use crate::sys::{self, PAGE};

/// Fills of zero above this size drop whole pages instead of writing them.
const DROP_FROM: u64 = 64 << 10;

/// Puts work on a stream and does it at once, unless the stream is captured.
pub(crate) fn submit(stream: u64, work: Work) -> Outcome {
    let work = {
        let mut gpu = gpu();
        gpu.check(&work)?;
        gpu.enqueue(stream, work)?
    };
    if let Some(work) = work {
        perform(&work);
    }
    Ok(())
}

/// Replays a graph on a stream.
pub(crate) fn replay(stream: u64, executable: u64) -> Outcome {
    let work = {
        let mut gpu = gpu();
        let work = gpu.graphs.work(executable)?;
        // A launch inside a capture is one node of it; what it would do is not done again.
        if gpu.enqueue(stream, Work::Library)?.is_none() {
            return Ok(());
        }
        for work in &work {
            gpu.check(work).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        }
        work
    };
    work.iter().for_each(perform);
    Ok(())
}

impl Gpu {
    /// Whether the device ranges that work touches exist. Addresses outside every device are the program's own
    /// memory, and believed.
    pub(crate) fn check(&self, work: &Work) -> Outcome {
        let rows = |address: u64, pitch: u64, bytes: u64, n_rows: u64| {
            (address, pitch * n_rows.saturating_sub(1) + bytes)
        };
        let ranges = match *work {
            Work::Copy { target, source, bytes } => [(target, bytes), (source, bytes)],
            Work::CopyRows { target, target_pitch, source, source_pitch, bytes, n_rows } => {
                [rows(target, target_pitch, bytes, n_rows), rows(source, source_pitch, bytes, n_rows)]
            }
            Work::Fill { target, width, count, .. } => [(target, width * count), (0, 0)],
            _ => return Ok(()),
        };
        for (address, bytes) in ranges {
            if let Some(device) = self.device_of(address)
                && bytes > 0
                && !self.devices[device].is_live(address, bytes)
            {
                return Err(Code::INVALID_VALUE);
            }
        }
        Ok(())
    }
}

/// Does one piece of work. The lock is not held: a function of the program may call back.
fn perform(work: &Work) {
    let moves_bytes = config().does_copy;
    match *work {
        Work::Kernel(Some(ref effect)) => effect.apply(),
        Work::Copy { target, source, bytes } if moves_bytes || is_small(bytes) => {
            // SAFETY: device ranges were checked to be live, and the program vouches for its own by calling
            // `cudaMemcpy` and its relatives with them.
            unsafe { sys::copy(target, source, bytes) };
        }
        Work::CopyRows { target, target_pitch, source, source_pitch, bytes, n_rows } if moves_bytes => {
            for row in 0..n_rows {
                // SAFETY: as above, for each row.
                unsafe { sys::copy(target + row * target_pitch, source + row * source_pitch, bytes) };
            }
        }
        Work::Fill { target, pattern, width, count } if moves_bytes || is_small(width * count) => {
            fill(target, pattern, width, count);
        }
        Work::Host { function, data } => {
            // SAFETY: the program passed a `cudaHostFn_t` and its data.
            unsafe { sys::call(function, data) };
        }
        Work::Callback { function, stream, data } => {
            // SAFETY: the program passed a `cudaStreamCallback_t` and its data.
            unsafe { sys::call_back(function, stream, data) };
        }
        // Nothing to do, and what moves bytes while none are moved.
        Work::Empty
        | Work::Library
        | Work::Kernel(None)
        | Work::Copy { .. }
        | Work::CopyRows { .. }
        | Work::Fill { .. } => {}
    }
}

/// Scalars travel even when copies are off: programs branch on them.
fn is_small(bytes: u64) -> bool {
    bytes <= 64
}

fn fill(target: u64, pattern: u32, width: u64, count: u64) {
    let (bytes, end) = (width * count, target + width * count);
    let (inner, inner_end) = (target.next_multiple_of(PAGE), end / PAGE * PAGE);
    let drops_pages = pattern == 0 && bytes >= DROP_FROM && drop_pages(inner, inner_end - inner);
    let parts = if drops_pages {
        // What is left over at both ends, byte by byte.
        [(target, 1, inner - target), (inner_end, 1, end - inner_end)]
    } else {
        [(target, width, count), (target, 1, 0)]
    };
    for (address, width, count) in parts {
        // SAFETY: the range was checked to be live, or is the program's own and it vouches for it by calling
        // `cudaMemset`; the parts lie in it.
        unsafe { sys::fill(address, pattern, width, count) };
    }
}

/// Makes whole pages read as zero without touching them, if they are a device's private memory.
fn drop_pages(address: u64, bytes: u64) -> bool {
    let gpu = gpu();
    gpu.device_of(address).is_some_and(|index| {
        let device = &gpu.devices[index];
        device.is_plain(address) && device.arena.zero_pages(address, bytes)
    })
}

const _: () = assert!(DROP_FROM > 2 * PAGE, "two whole pages lie in every fill that drops some");
