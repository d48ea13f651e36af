//! A device of host memory: real bytes, a capacity, streams that are always idle.
//!
//! Plain memory is an anonymous mapping each, so its address is a real pointer. Physical memory for expandable
//! segments is a mapping each too; reserved addresses are only names, and [`HostMemory`] finds the bytes behind
//! them. Giving memory back unmaps it, so the process shrinks as a GPU would.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use super::placement::{Placement, grain};
use super::{Device, DeviceError, EventId, MemInfo, PhysicalHandle, StreamId};

#[derive(Debug)]
struct State {
    total: u64,
    used: u64,
    /// Memory by first address: plain segments, and pages at the address they are mapped to.
    memory: BTreeMap<u64, MmapMut>,
    /// Physical memory that is not mapped at present.
    unmapped: BTreeMap<u64, MmapMut>,
    /// Where mapped physical memory is.
    mapped_at: BTreeMap<u64, u64>,
    reservations: Placement,
    next_handle: u64,
}

impl State {
    fn create(&mut self, bytes: u64) -> Result<MmapMut, DeviceError> {
        let used = self.used.checked_add(grain(bytes)).filter(|used| *used <= self.total);
        let used = used.ok_or(DeviceError::OutOfMemory)?;
        let length = usize::try_from(bytes).map_err(|_| DeviceError::OutOfMemory)?;
        // The host refusing is out of memory as well: the allocator can free something and come back.
        let memory = MmapMut::map_anon(length).map_err(|_| DeviceError::OutOfMemory)?;
        self.used = used;
        Ok(memory)
    }

    /// The mapping that holds `length` bytes from `address` on, and where they begin in it.
    fn slice(&mut self, address: u64, length: usize) -> Option<&mut [u8]> {
        let (&start, memory) = self.memory.range_mut(..=address).next_back()?;
        let from = usize::try_from(address - start).ok()?;
        memory.get_mut(from..from.checked_add(length)?)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A reader that panicked has changed nothing but bytes, so its lock is as good as any.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads and writes the bytes of a [`HostDevice`]; a copy may be kept beside the allocator.
#[derive(Clone, Debug)]
pub struct HostMemory(Arc<Mutex<State>>);

impl HostMemory {
    /// Copies bytes in. Returns false when the range is not memory, or crosses a page of an expandable segment.
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let mut state = lock(&self.0);
        state.slice(address, bytes.len()).map(|slice| slice.copy_from_slice(bytes)).is_some()
    }

    /// Copies bytes out, or `None` as for [`write`](HostMemory::write).
    pub fn read(&self, address: u64, length: usize) -> Option<Vec<u8>> {
        lock(&self.0).slice(address, length).map(|slice| slice.to_vec())
    }

    /// Bytes in use on the device.
    pub fn used_bytes(&self) -> u64 {
        lock(&self.0).used
    }
}

/// Host memory that behaves like a device with a capacity.
#[derive(Debug)]
pub struct HostDevice {
    memory: HostMemory,
}

impl HostDevice {
    /// A device with `total_bytes` of memory; the host commits pages only when they are written.
    pub fn new(total_bytes: u64) -> HostDevice {
        let state = State {
            total: total_bytes,
            used: 0,
            memory: BTreeMap::new(),
            unmapped: BTreeMap::new(),
            mapped_at: BTreeMap::new(),
            reservations: Placement::default(),
            next_handle: 1,
        };
        HostDevice { memory: HostMemory(Arc::new(Mutex::new(state))) }
    }

    /// A way to the bytes, which stays usable when the device has moved into an allocator.
    pub fn memory(&self) -> HostMemory {
        self.memory.clone()
    }
}

fn unknown(what: &str, address: u64) -> DeviceError {
    DeviceError::Failed(format!("no {what} at `{address:#x}`"))
}

impl Device for HostDevice {
    fn malloc(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let mut state = lock(&self.memory.0);
        let memory = state.create(bytes)?;
        let address = memory.as_ptr().expose_provenance() as u64;
        state.memory.insert(address, memory);
        Ok(address)
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let mut state = lock(&self.memory.0);
        state.memory.remove(&address).ok_or_else(|| unknown("memory", address))?;
        state.used -= grain(bytes);
        Ok(())
    }

    fn mem_info(&self) -> MemInfo {
        let state = lock(&self.memory.0);
        MemInfo { free_bytes: state.total - state.used, total_bytes: state.total }
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        Ok(lock(&self.memory.0).reservations.reserve(bytes))
    }

    fn release_reservation(&mut self, address: u64, _bytes: u64) -> Result<(), DeviceError> {
        lock(&self.memory.0).reservations.release_reservation(address);
        Ok(())
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let mut state = lock(&self.memory.0);
        let memory = state.create(bytes)?;
        let handle = state.next_handle;
        state.next_handle += 1;
        state.unmapped.insert(handle, memory);
        Ok(PhysicalHandle(handle))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<(), DeviceError> {
        let mut state = lock(&self.memory.0);
        let memory = state.unmapped.remove(&handle.0).ok_or_else(|| unknown("unmapped memory", handle.0))?;
        state.used -= grain(memory.len() as u64);
        Ok(())
    }

    fn map(&mut self, address: u64, _bytes: u64, handle: PhysicalHandle) -> Result<(), DeviceError> {
        let mut state = lock(&self.memory.0);
        let memory = state.unmapped.remove(&handle.0).ok_or_else(|| unknown("unmapped memory", handle.0))?;
        state.memory.insert(address, memory);
        state.mapped_at.insert(address, handle.0);
        Ok(())
    }

    fn unmap(&mut self, address: u64, _bytes: u64) -> Result<(), DeviceError> {
        let mut state = lock(&self.memory.0);
        let handle = state.mapped_at.remove(&address).ok_or_else(|| unknown("mapped memory", address))?;
        let memory = state.memory.remove(&address).ok_or_else(|| unknown("mapped memory", address))?;
        state.unmapped.insert(handle, memory);
        Ok(())
    }

    fn set_access(&mut self, _address: u64, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn record_event(&mut self, _stream: StreamId) -> Result<EventId, DeviceError> {
        Ok(EventId(0))
    }

    fn query_event(&mut self, _event: EventId) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn synchronize_event(&mut self, _event: EventId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn destroy_event(&mut self, _event: EventId) {}

    fn synchronize_stream(&mut self, _stream: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
}
