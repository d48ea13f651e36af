//! A device of addresses only: nothing is behind them. Replays and benchmarks run over it.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::placement::{Placement, grain};
use super::{Device, DeviceError, EventId, MemInfo, PhysicalHandle, StreamId};

/// How far a stream has come.
#[derive(Debug, Default)]
struct Clock {
    /// Events recorded so far.
    recorded: u64,
    /// Events complete so far.
    completed: u64,
    busy: bool,
    capturing: bool,
}

/// Addresses without memory, with a capacity and streams that are busy when told so.
///
/// Addresses follow the driver's placement ([`Placement`]) unless the caller says which ones come next
/// ([`expect_segment`](NullDevice::expect_segment)).
#[derive(Debug)]
pub struct NullDevice {
    total: u64,
    used: u64,
    /// Bytes in use beyond which requests are refused, below `total`; see `set_room`.
    ceiling: Option<u64>,
    placement: Placement,
    /// Addresses of coming segments and reservations, as recorded.
    expected_segments: VecDeque<u64>,
    expected_reservations: VecDeque<u64>,
    handles: FxHashMap<u64, u64>,
    next_handle: u64,
    streams: FxHashMap<StreamId, Clock>,
    events: FxHashMap<u64, (StreamId, u64)>,
    next_event: u64,
}

impl NullDevice {
    /// A device with `total_bytes` of memory.
    pub fn new(total_bytes: u64) -> NullDevice {
        NullDevice {
            total: total_bytes,
            used: 0,
            ceiling: None,
            placement: Placement::default(),
            expected_segments: VecDeque::new(),
            expected_reservations: VecDeque::new(),
            handles: FxHashMap::default(),
            next_handle: 1,
            streams: FxHashMap::default(),
            events: FxHashMap::default(),
            next_event: 1,
        }
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.used
    }

    /// Bytes that a request takes up on a device: rounded up to 2 MiB.
    pub fn rounded(bytes: u64) -> u64 {
        grain(bytes)
    }

    /// From now on refuses what would bring the bytes in use above what they are now plus `room`, as a device
    /// does on which others hold memory; `None` lifts that. A negative room asks for memory back first.
    pub fn set_room(&mut self, room: Option<i64>) {
        self.ceiling = room.map(|room| self.used.saturating_add_signed(room));
    }

    /// The next segment will be at this address.
    pub fn expect_segment(&mut self, address: u64) {
        self.expected_segments.push_back(address);
    }

    /// The next reservation will be at this address.
    pub fn expect_reservation(&mut self, address: u64) {
        self.expected_reservations.push_back(address);
    }

    /// Forgets expectations that were not met.
    pub fn clear_expectations(&mut self) {
        self.expected_segments.clear();
        self.expected_reservations.clear();
    }

    /// From now on events recorded on a stream stay incomplete, until it is idle or waited for.
    pub fn set_busy(&mut self, stream: StreamId) {
        self.streams.entry(stream).or_default().busy = true;
    }

    /// A stream catches up: all its events are complete.
    pub fn set_idle(&mut self, stream: StreamId) {
        let clock = self.streams.entry(stream).or_default();
        clock.busy = false;
        clock.completed = clock.recorded;
    }

    /// Whether a stream is being captured.
    pub fn set_capturing(&mut self, stream: StreamId, capturing: bool) {
        self.streams.entry(stream).or_default().capturing = capturing;
    }

    fn take(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let most = self.ceiling.unwrap_or(self.total).min(self.total);
        let used = self.used.checked_add(grain(bytes)).filter(|used| *used <= most);
        self.used = used.ok_or(DeviceError::OutOfMemory)?;
        Ok(())
    }
}

impl Device for NullDevice {
    fn malloc(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        self.take(bytes)?;
        if let Some(address) = self.expected_segments.pop_front()
            && self.placement.occupy(address, bytes)
        {
            return Ok(address);
        }
        Ok(self.placement.place(bytes))
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        self.used -= grain(bytes);
        self.placement.remove(address, bytes);
        Ok(())
    }

    fn mem_info(&self) -> MemInfo {
        MemInfo { free_bytes: self.total - self.used, total_bytes: self.total }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        if let Some(address) = self.expected_reservations.pop_front() {
            self.placement.reserve_at(address, bytes);
            return Ok(address);
        }
        Ok(self.placement.reserve(bytes))
    }

    fn release_reservation(&mut self, address: u64, _bytes: u64) -> Result<(), DeviceError> {
        self.placement.release_reservation(address);
        Ok(())
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        self.take(bytes)?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.handles.insert(handle, bytes);
        Ok(PhysicalHandle(handle))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<(), DeviceError> {
        match self.handles.remove(&handle.0) {
            Some(bytes) => {
                self.used -= grain(bytes);
                Ok(())
            }
            None => Err(DeviceError::Failed(format!("no such physical memory: `{}`", handle.0))),
        }
    }

    fn map(&mut self, _address: u64, _bytes: u64, _handle: PhysicalHandle) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap(&mut self, _address: u64, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_access(&mut self, _address: u64, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn adopt(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        self.take(bytes)?;
        if self.placement.occupy(address, bytes) {
            return Ok(());
        }
        Err(DeviceError::Failed(format!("the range at `{address:#x}` is taken")))
    }

    fn adopt_reservation(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        self.placement.reserve_at(address, bytes);
        Ok(())
    }

    fn record_event(&mut self, stream: StreamId) -> Result<EventId, DeviceError> {
        let clock = self.streams.entry(stream).or_default();
        clock.recorded += 1;
        if !clock.busy {
            clock.completed = clock.recorded;
        }
        let event = self.next_event;
        self.next_event += 1;
        self.events.insert(event, (stream, clock.recorded));
        Ok(EventId(event))
    }

    fn query_event(&mut self, event: EventId) -> Result<bool, DeviceError> {
        let (stream, number) = self.events.get(&event.0).copied().unwrap_or_default();
        Ok(self.streams.get(&stream).is_none_or(|clock| clock.completed >= number))
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        let (stream, number) = self.events.get(&event.0).copied().unwrap_or_default();
        if let Some(clock) = self.streams.get_mut(&stream) {
            clock.completed = clock.completed.max(number);
        }
        Ok(())
    }

    fn destroy_event(&mut self, event: EventId) {
        self.events.remove(&event.0);
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        if let Some(clock) = self.streams.get_mut(&stream) {
            clock.completed = clock.recorded;
        }
        Ok(())
    }

    /// Always 0: a replay's history has the times of the recording.
    fn now_us(&self) -> i64 {
        0
    }

    fn is_capturing(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_some_and(|clock| clock.capturing)
    }
}
