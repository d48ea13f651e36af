//! Physical memory of the virtual memory calls: handles with reference counts, and real bytes that stay with them.

use std::collections::{BTreeMap, HashMap};

use super::memory::{DeviceMemory, grain};
use crate::code::{Code, Outcome};
use crate::sys::{Arena, SharedMemory};

/// Room for all handles a process can have at a time; only touched pages cost anything.
const FILE_BYTES: u64 = 4 << 40;

/// All handles of the process.
#[derive(Default)]
pub(crate) struct Physical {
    handles: HashMap<u64, Handle>,
    last_handle: u64,
    /// Opened with the first handle: most programs need none.
    memory: Option<SharedMemory>,
    /// The end of the part of the file that was ever used.
    end: u64,
    /// Parts that were given back, by size. Pages of one segment have one size, so they fit again.
    free: BTreeMap<u64, Vec<u64>>,
}

/// Physical memory; it is gone when nobody refers to it and it is mapped nowhere.
#[derive(Debug)]
struct Handle {
    device: usize,
    bytes: u64,
    offset: u64,
    n_references: u64,
    n_mappings: u64,
}

impl Physical {
    /// `cuMemCreate`
    pub(crate) fn create(
        &mut self,
        device: &mut DeviceMemory,
        index: usize,
        bytes: u64,
    ) -> Result<u64, Code> {
        if bytes == 0 || grain(bytes) != bytes {
            return Err(Code::INVALID_VALUE);
        }
        device.charge(bytes)?;
        if self.memory.is_none() {
            self.memory = SharedMemory::new(FILE_BYTES);
        }
        let offset = match self.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(offset) => offset,
            None if self.memory.is_some() && FILE_BYTES - self.end >= bytes => {
                self.end += bytes;
                self.end - bytes
            }
            None => {
                device.discharge(bytes);
                return Err(Code::OUT_OF_MEMORY);
            }
        };
        self.last_handle += 1;
        let handle = Handle { device: index, bytes, offset, n_references: 1, n_mappings: 0 };
        self.handles.insert(self.last_handle, handle);
        Ok(self.last_handle)
    }

    /// The device a handle is on.
    pub(crate) fn device_of(&self, handle: u64) -> Result<usize, Code> {
        self.handles.get(&handle).map(|handle| handle.device).ok_or(Code::INVALID_VALUE)
    }

    /// `cuMemRetainAllocationHandle`
    pub(crate) fn retain(&mut self, handle: u64) -> Outcome {
        let handle = self.handles.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        handle.n_references += 1;
        Ok(())
    }

    /// `cuMemRelease`
    pub(crate) fn release(&mut self, device: &mut DeviceMemory, handle: u64) -> Outcome {
        let entry = self.handles.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        entry.n_references = entry.n_references.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        self.settle(device, handle);
        Ok(())
    }

    /// Puts a handle behind addresses.
    pub(crate) fn map_into(&mut self, arena: &Arena, address: u64, bytes: u64, handle: u64) -> Outcome {
        let (Some(entry), Some(memory)) = (self.handles.get_mut(&handle), &self.memory) else {
            return Err(Code::INVALID_VALUE);
        };
        if entry.bytes != bytes {
            return Err(Code::INVALID_VALUE);
        }
        if !arena.map(address, bytes, memory, entry.offset) {
            return Err(Code::OUT_OF_MEMORY);
        }
        entry.n_mappings += 1;
        Ok(())
    }

    /// One mapping of a handle is gone.
    pub(crate) fn unmapped(&mut self, device: &mut DeviceMemory, handle: u64) {
        if let Some(entry) = self.handles.get_mut(&handle) {
            entry.n_mappings = entry.n_mappings.saturating_sub(1);
        }
        self.settle(device, handle);
    }

    fn settle(&mut self, device: &mut DeviceMemory, handle: u64) {
        let is_gone =
            self.handles.get(&handle).is_some_and(|entry| entry.n_references == 0 && entry.n_mappings == 0);
        if is_gone && let Some(entry) = self.handles.remove(&handle) {
            if let Some(memory) = &self.memory {
                memory.discard(entry.offset, entry.bytes);
            }
            self.free.entry(entry.bytes).or_default().push(entry.offset);
            device.discharge(entry.bytes);
        }
    }
}
