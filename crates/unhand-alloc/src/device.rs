//! What the allocator asks of a device: memory, virtual memory, events and streams. No policy lives here.

mod host;
mod null;
mod placement;

pub use host::{HostDevice, HostMemory};
pub use null::NullDevice;
pub use placement::Placement;

use std::fmt;

/// A stream's raw handle; 0 is the legacy default stream. Streams are ordered as unsigned integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl StreamId {
    /// The legacy default stream.
    pub const DEFAULT: StreamId = StreamId(0);
}

/// A device's name for an event it recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// A device's name for physical memory that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalHandle(pub u64);

/// Free and total bytes, as the driver states them (`cudaMemGetInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// Bytes nobody holds.
    pub free_bytes: u64,
    /// Bytes the device has.
    pub total_bytes: u64,
}

/// Why a device refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not enough memory (`cudaErrorMemoryAllocation`): the allocator frees something and tries again.
    #[error("the device is out of memory")]
    OutOfMemory,
    /// The device has no virtual memory management.
    #[error("the device has no virtual memory management")]
    NoVirtualMemory,
    /// Anything else; never retried.
    #[error("device call failed: {0}")]
    Failed(String),
}

/// A device the caching allocator runs over.
///
/// All sizes and addresses are bytes. The allocator calls every method under its own lock, so an
/// implementation needs none. The states of an address range are *reserved* (no memory behind it), *mapped*
/// (memory, no access yet) and *in use* (after [`set_access`](Device::set_access)).
pub trait Device {
    /// Plain memory (`cudaMalloc`). Returns an address aligned to at least 512 bytes.
    fn malloc(&mut self, bytes: u64) -> Result<u64, DeviceError>;
    /// Gives back what [`malloc`](Device::malloc) returned (`cudaFree`). The device may wait for its work first.
    fn free(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError>;
    /// Free and total bytes (`cudaMemGetInfo`).
    fn mem_info(&self) -> MemInfo;

    /// The granularity of [`create`](Device::create) in bytes.
    fn granularity(&self) -> u64 {
        2 << 20
    }
    /// Reserves addresses without memory (`cuMemAddressReserve`).
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError>;
    /// Gives a reservation back (`cuMemAddressFree`).
    fn release_reservation(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError>;
    /// Physical memory (`cuMemCreate`).
    fn create(&mut self, bytes: u64) -> Result<PhysicalHandle, DeviceError>;
    /// Gives physical memory back (`cuMemRelease`); it must not be mapped any more.
    fn release(&mut self, handle: PhysicalHandle) -> Result<(), DeviceError>;
    /// Puts physical memory behind reserved addresses (`cuMemMap`).
    fn map(&mut self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<(), DeviceError>;
    /// Takes it away again (`cuMemUnmap`).
    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError>;
    /// Makes mapped addresses usable (`cuMemSetAccess`).
    fn set_access(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError>;

    /// Takes over plain memory that is in use already, so that [`free`](Device::free) accepts it.
    fn adopt(&mut self, _address: u64, _bytes: u64) -> Result<(), DeviceError> {
        Err(DeviceError::Failed("this device cannot take over memory".into()))
    }
    /// Takes over a reservation that exists already.
    fn adopt_reservation(&mut self, _address: u64, _bytes: u64) -> Result<(), DeviceError> {
        Err(DeviceError::Failed("this device cannot take over reservations".into()))
    }

    /// Records an event on a stream: complete once everything submitted there before has run.
    fn record_event(&mut self, stream: StreamId) -> Result<EventId, DeviceError>;
    /// Whether an event is complete; never blocks (`cudaEventQuery`).
    fn query_event(&mut self, event: EventId) -> Result<bool, DeviceError>;
    /// Waits for an event (`cudaEventSynchronize`).
    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError>;
    /// Forgets an event; the allocator calls it once for each recorded event.
    fn destroy_event(&mut self, event: EventId);
    /// Waits for a stream (`cudaStreamSynchronize`).
    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;
    /// Whether a stream is being captured into a graph.
    fn is_capturing(&self, _stream: StreamId) -> bool {
        false
    }

    /// Microseconds since the epoch, for the event history.
    fn now_us(&self) -> i64 {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since_epoch.map_or(0, |elapsed| i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX))
    }
}

/// The segment allocator of one private pool, in place of the device's own `malloc`/`free`
/// (`torch.cuda.MemPool(allocator=…)`). Sizes are whole segments, in bytes.
pub trait SegmentSource: Send {
    /// A segment of `bytes`, or `None` for out of memory.
    fn alloc(&mut self, bytes: u64, stream: StreamId) -> Option<u64>;
    /// Gives a segment back.
    fn free(&mut self, address: u64, bytes: u64, stream: StreamId);
}

impl fmt::Debug for dyn SegmentSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SegmentSource")
    }
}
