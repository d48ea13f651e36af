//! PyTorch's CUDA caching allocator, re-implemented over a [`Device`]: the same blocks at the same addresses,
//! the same statistics, the same order of driver calls.
//!
//! The crate holds no `unsafe`, reads no file and starts no thread. What a device is comes from outside:
//! [`NullDevice`] hands out addresses only (replays, benchmarks), [`HostDevice`] real host memory.
//!
//! * [`CachingAllocator`] is the thread-safe front, one lock per device;
//! * [`DeviceAllocator`] is one device's allocator, for callers with a lock of their own;
//! * [`Settings`] is `PYTORCH_CUDA_ALLOC_CONF`, [`Profile`] what differs between PyTorch releases.
//!
//! Words are PyTorch's: a *segment* comes from the device and is cut into *blocks*; *allocated* bytes are in
//! blocks handed out, *reserved* bytes are held from the device, *requested* bytes are what was asked for.
//!
//! ```
//! use unhand_alloc::{CachingAllocator, HostDevice, Request};
//! let allocator = CachingAllocator::new(vec![HostDevice::new(64 << 20)]);
//! let weights = allocator.malloc(0, Request::new(3 << 20))?;
//! allocator.free(0, weights)?;
//! // Freed, but cached: the device still counts it as used.
//! assert_eq!(allocator.memory_allocated(0)?, 0);
//! assert_eq!(allocator.mem_get_info(0)?.free_bytes, 44 << 20);
//! allocator.empty_cache()?;
//! assert_eq!(allocator.mem_get_info(0)?.free_bytes, 64 << 20);
//! # Ok::<(), unhand_alloc::AllocError>(())
//! ```
#![forbid(unsafe_code)]

mod address_table;
mod allocator;
mod block;
mod bytes;
mod caching;
mod device;
mod error;
mod free_set;
mod history;
mod pool;
mod profile;
mod settings;
mod size;
mod stats;
mod summary;

pub use allocator::{
    Allocation, BlockInfo, BlockState, Checkpoint, CheckpointBlock, DeviceAllocator, Request, RestoreBlock,
    RestoreSegment, Restored, SegmentInfo, Violation,
};
pub use block::Context;
pub use bytes::{Bytes, BytesChange, BytesError};
pub use caching::CachingAllocator;
pub use device::{
    Device, DeviceError, EventId, HostDevice, HostMemory, MemInfo, NullDevice, PhysicalHandle, Placement,
    SegmentSource, StreamId,
};
pub use error::{AllocError, OutOfMemory};
pub use history::{Action, HistoryLevel, TraceEntry};
pub use pool::{PoolId, PoolOptions, Route, ThreadToken};
pub use profile::{Parser, Profile, Release, UnknownRelease};
pub use settings::{Reserve, Settings, SettingsError};
pub use size::{
    LARGE_BUFFER, MIN_BLOCK_SIZE, MIN_LARGE_ALLOC, ONE_EXA_BYTE, PoolKind, ROUND_LARGE, ROUNDUP_SLOTS,
    RoundupTable, SMALL_BUFFER, SMALL_SIZE, round_size, segment_size,
};
pub use stats::{DeviceStats, Stat};
