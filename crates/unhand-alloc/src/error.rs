//! What can go wrong in the allocator, in words a user can act on.

use std::fmt;

use crate::bytes::Bytes;
use crate::device::DeviceError;
use crate::pool::PoolId;
use crate::settings::SettingsError;

/// Why a request to the allocator failed. The allocator stays usable after each of them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// Nothing that could be freed was enough.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// One exbibyte or more was asked for.
    #[error("out of memory: a request of {0} bytes is more than 1 EiB")]
    TooLarge(u64),
    /// The address was not handed out, or was freed already.
    #[error("invalid device pointer: `{0:#x}`")]
    InvalidPointer(u64),
    /// A block was wanted at an address that is not free memory of its pool and stream.
    #[error("no free memory for {bytes} bytes at `{address:#x}`")]
    NotFree {
        /// The address asked for.
        address: u64,
        /// Rounded bytes asked for.
        bytes: u64,
    },
    /// No device has this index.
    #[error("no such device: `{0}`")]
    NoSuchDevice(usize),
    /// The pool does not exist, or nobody holds it any more.
    #[error("no such memory pool: `{0}`")]
    NoSuchPool(PoolId),
    /// The pool is in a state that does not allow the call.
    #[error("memory pool `{id}`: {reason}")]
    PoolState {
        /// The pool.
        id: PoolId,
        /// What stands against it.
        reason: &'static str,
    },
    /// A memory fraction outside 0 … 1.
    #[error("memory fraction must be between 0 and 1")]
    BadFraction,
    /// The settings were refused.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A state to restore does not add up.
    #[error("cannot restore this state: {0}")]
    BadState(String),
    /// The device refused for another reason than memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What the allocator knew when it ran out of memory; all sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Asked for by the caller.
    pub requested_bytes: u64,
    /// Asked for from the device: the size of a new segment.
    pub segment_bytes: u64,
    /// The device's memory.
    pub total_bytes: u64,
    /// Free on the device at that moment.
    pub free_bytes: u64,
    /// The limit set by the memory fraction, if any.
    pub allowed_bytes: Option<u64>,
    /// In blocks that are handed out.
    pub allocated_bytes: u64,
    /// Held from the device.
    pub reserved_bytes: u64,
    /// Free blocks of private pools, which other requests cannot use.
    pub private_pool_free_bytes: u64,
    /// Refused beforehand by `throw_on_cudamalloc_oom`, without asking the device.
    pub rejected: bool,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory: a segment of {} was needed for a request of {}; the device has {}, {} of it free",
            Bytes(self.segment_bytes),
            Bytes(self.requested_bytes),
            Bytes(self.total_bytes),
            Bytes(self.free_bytes),
        )?;
        if let Some(allowed) = self.allowed_bytes {
            write!(f, "; the limit is {}", Bytes(allowed))?;
        }
        let cached = self.reserved_bytes.saturating_sub(self.allocated_bytes);
        write!(f, "; {} are allocated and {} reserved but free", Bytes(self.allocated_bytes), Bytes(cached))?;
        if self.private_pool_free_bytes > 0 {
            write!(f, ", {} of that in private pools", Bytes(self.private_pool_free_bytes))?;
        }
        if self.rejected {
            f.write_str("; refused before asking the device (`throw_on_cudamalloc_oom`)")?;
        }
        Ok(())
    }
}

impl std::error::Error for OutOfMemory {}
