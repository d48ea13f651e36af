//! One device's memory: address space, plain allocations, reservations and what is mapped into them.

use std::collections::BTreeMap;

use unhand_alloc::Placement;

use super::physical::Physical;
use crate::code::{Code, Outcome};
use crate::sys::Arena;

/// Memory comes in units of this many bytes, plain and mapped.
pub(crate) const GRAIN: u64 = 2 << 20;
const CHUNK: u64 = 32 << 20;
/// All devices together take at most this much of the 128 TiB a process has.
const ADDRESS_SPACE: u64 = 64 << 40;
const MOST_PER_DEVICE: u64 = 16 << 40;

/// A device's memory.
///
/// Where things go is the allocator crate's model of the driver, in addresses of its own; here they are moved
/// into this device's range of address space. The order of addresses stays as it is, and order is what PyTorch's
/// allocator looks at.
pub(crate) struct DeviceMemory {
    pub(crate) arena: Arena,
    pub(crate) memory_bytes: u64,
    /// What is given out before anything is refused.
    capacity_bytes: u64,
    /// What the context takes, once there is one.
    context_bytes: u64,
    has_context: bool,
    used_bytes: u64,
    placement: Placement,
    /// Added to a placement's address of plain memory.
    plain_shift: u64,
    /// Added to a placement's address of a reservation.
    reserved_shift: u64,
    /// First byte → bytes that were asked for.
    allocations: BTreeMap<u64, u64>,
    /// First byte → bytes.
    reservations: BTreeMap<u64, u64>,
    /// First byte → what is mapped there.
    mappings: BTreeMap<u64, Mapping>,
}

/// Physical memory behind a range of a reservation.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
    is_usable: bool,
}

/// Bytes that `bytes` take up.
pub(crate) fn grain(bytes: u64) -> u64 {
    bytes.div_ceil(GRAIN).max(1).saturating_mul(GRAIN)
}

impl DeviceMemory {
    /// One of `n_devices`; nothing if there is no address space for it.
    pub(crate) fn new(n_devices: usize, memory_bytes: u64, context_bytes: u64) -> Option<DeviceMemory> {
        let share = ADDRESS_SPACE / u64::try_from(n_devices.max(1)).ok()?;
        let arena = Arena::reserve(share.min(MOST_PER_DEVICE), GRAIN)?;
        let mut placement = Placement::default();
        // Two probes tell where the model puts things: plain memory grows down from its top, reservations up.
        let top = placement.place(CHUNK) + CHUNK;
        placement.remove(top - CHUNK, CHUNK);
        let floor = placement.reserve(GRAIN);
        placement.release_reservation(floor);
        let plain_shift = (arena.base + arena.bytes).wrapping_sub(top);
        let reserved_shift = arena.base.wrapping_sub(floor);
        Some(DeviceMemory {
            arena,
            memory_bytes,
            capacity_bytes: memory_bytes,
            context_bytes: context_bytes.min(memory_bytes),
            has_context: false,
            used_bytes: 0,
            placement,
            plain_shift,
            reserved_shift,
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
        })
    }

    /// The same device, which refuses at another point than the one it states.
    pub(crate) fn giving_out(self, capacity_bytes: u64) -> DeviceMemory {
        DeviceMemory { capacity_bytes, ..self }
    }

    /// Something needs the device's context: it is made if there is none, and stays.
    pub(crate) fn enter(&mut self) {
        self.has_context = true;
    }

    /// Whether the program has used the device.
    pub(crate) fn has_context(&self) -> bool {
        self.has_context
    }

    /// What nobody holds.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.left_of(self.memory_bytes)
    }

    fn left_of(&self, bytes: u64) -> u64 {
        let context_bytes = if self.has_context { self.context_bytes } else { 0 };
        bytes.saturating_sub(context_bytes).saturating_sub(self.used_bytes)
    }

    /// What this process holds, its context counted.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.memory_bytes - self.free_bytes()
    }

    /// What plain allocations take up.
    pub(crate) fn plain_bytes(&self) -> u64 {
        self.allocations.values().map(|bytes| grain(*bytes)).sum()
    }

    /// Counts memory as used, or refuses.
    pub(crate) fn charge(&mut self, bytes: u64) -> Outcome {
        self.enter();
        if bytes > self.left_of(self.capacity_bytes) {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.used_bytes += bytes;
        Ok(())
    }

    /// Counts it as free again.
    pub(crate) fn discharge(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// `cudaMalloc`
    pub(crate) fn malloc(&mut self, bytes: u64) -> Result<u64, Code> {
        let size = grain(bytes);
        self.charge(size)?;
        let address = self.placement.place(bytes).wrapping_add(self.plain_shift);
        if !self.arena.commit(address, size) {
            // The operating system refused: out of address space or of mappings.
            self.placement.remove(address.wrapping_sub(self.plain_shift), bytes);
            self.discharge(size);
            return Err(Code::OUT_OF_MEMORY);
        }
        self.allocations.insert(address, bytes);
        Ok(address)
    }

    /// `cudaFree`
    pub(crate) fn free(&mut self, address: u64) -> Outcome {
        let bytes = self.allocations.remove(&address).ok_or(Code::INVALID_VALUE)?;
        self.arena.discard(address, grain(bytes));
        self.placement.remove(address.wrapping_sub(self.plain_shift), bytes);
        self.discharge(grain(bytes));
        Ok(())
    }

    /// `cuMemAddressReserve`; where the program would like it does not matter.
    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 || !bytes.is_multiple_of(GRAIN) {
            return Err(Code::INVALID_VALUE);
        }
        let placed = self.placement.reserve(bytes);
        let address = placed.wrapping_add(self.reserved_shift);
        // The upper half of the range is for plain memory.
        if !self.arena.contains(address, bytes.saturating_add(self.arena.bytes / 2)) {
            self.placement.release_reservation(placed);
            return Err(Code::OUT_OF_MEMORY);
        }
        self.reservations.insert(address, bytes);
        Ok(address)
    }

    /// `cuMemAddressFree`: the whole reservation, with nothing mapped in it.
    pub(crate) fn release_reservation(&mut self, address: u64, bytes: u64) -> Outcome {
        if self.reservations.get(&address) != Some(&bytes) {
            return Err(Code::INVALID_VALUE);
        }
        if self.mappings.range(address..address + bytes).next().is_some() {
            return Err(Code::INVALID_VALUE);
        }
        self.reservations.remove(&address);
        self.placement.release_reservation(address.wrapping_sub(self.reserved_shift));
        Ok(())
    }

    /// `cuMemMap`: the whole of a handle, at a place of a reservation where nothing is.
    pub(crate) fn map(&mut self, address: u64, bytes: u64, handle: u64, physical: &mut Physical) -> Outcome {
        let is_reserved = self
            .reservations
            .range(..=address)
            .next_back()
            .is_some_and(|(start, size)| address + bytes <= start + size);
        let below = self.mappings.range(..address + bytes).next_back();
        let is_taken = below.is_some_and(|(start, mapping)| start + mapping.bytes > address);
        if !is_reserved || is_taken || !address.is_multiple_of(GRAIN) {
            return Err(Code::INVALID_VALUE);
        }
        physical.map_into(&self.arena, address, bytes, handle)?;
        self.mappings.insert(address, Mapping { bytes, handle, is_usable: false });
        Ok(())
    }

    /// The mappings of a range that they fill without a gap.
    fn mapped(&self, address: u64, bytes: u64) -> Result<Vec<u64>, Code> {
        let mut next = address;
        let mut starts = Vec::new();
        for (&start, mapping) in self.mappings.range(address..address.saturating_add(bytes)) {
            if start != next {
                return Err(Code::INVALID_VALUE);
            }
            starts.push(start);
            next = start + mapping.bytes;
        }
        if next == address + bytes { Ok(starts) } else { Err(Code::INVALID_VALUE) }
    }

    /// `cuMemSetAccess`
    pub(crate) fn set_access(&mut self, address: u64, bytes: u64, is_usable: bool) -> Outcome {
        for start in self.mapped(address, bytes)? {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                mapping.is_usable = is_usable;
            }
        }
        if self.arena.set_access(address, bytes, is_usable) { Ok(()) } else { Err(Code::UNKNOWN) }
    }

    /// `cuMemUnmap`: whole mappings. Returns the handles that were mapped there.
    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Result<Vec<u64>, Code> {
        let starts = self.mapped(address, bytes)?;
        self.arena.discard(address, bytes);
        Ok(starts
            .iter()
            .filter_map(|start| self.mappings.remove(start))
            .map(|mapping| mapping.handle)
            .collect())
    }

    /// The handle mapped at an address, and where its mapping begins.
    pub(crate) fn handle_at(&self, address: u64) -> Option<u64> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then_some(mapping.handle)
    }

    /// The range that an address is in: an allocation, a reservation.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, u64)> {
        [&self.allocations, &self.reservations].into_iter().find_map(|ranges| {
            let (&start, &bytes) = ranges.range(..=address).next_back()?;
            (address < start + bytes.max(1)).then_some((start, bytes))
        })
    }

    /// Whether every byte of a range can be used.
    pub(crate) fn is_live(&self, address: u64, bytes: u64) -> bool {
        let plain = self.allocations.range(..=address).next_back();
        if plain.is_some_and(|(start, size)| address + bytes <= start + grain(*size)) {
            return true;
        }
        // Mapped pages: possibly several, side by side.
        let mut next = address;
        let Some((&first, _)) = self.mappings.range(..=address).next_back() else { return false };
        for (&start, mapping) in self.mappings.range(first..) {
            if start > next || !mapping.is_usable {
                return false;
            }
            next = next.max(start + mapping.bytes);
            if next >= address + bytes {
                return true;
            }
        }
        false
    }

    /// Whether a range is private memory, which can be zeroed without touching it.
    pub(crate) fn is_plain(&self, address: u64) -> bool {
        self.allocations
            .range(..=address)
            .next_back()
            .is_some_and(|(start, size)| address < start + grain(*size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn device(memory_bytes: u64) -> DeviceMemory {
        DeviceMemory::new(1, memory_bytes, 4 * MIB).expect("address space")
    }

    #[test]
    fn a_context_takes_memory_once_something_needs_it() {
        let mut device = device(64 * MIB);
        assert_eq!((device.has_context(), device.free_bytes(), device.held_bytes()), (false, 64 * MIB, 0));
        device.enter();
        assert_eq!(
            (device.has_context(), device.free_bytes(), device.held_bytes()),
            (true, 60 * MIB, 4 * MIB)
        );
    }

    #[test]
    fn counts_in_units_of_2_mib_and_refuses_beyond_capacity() {
        let mut device = device(64 * MIB);
        device.enter();
        assert_eq!(device.free_bytes(), 60 * MIB);
        let first = device.malloc(1).expect("fits");
        assert_eq!((device.free_bytes(), device.held_bytes()), (58 * MIB, 6 * MIB));
        assert_eq!(device.malloc(59 * MIB), Err(Code::OUT_OF_MEMORY));
        assert!(device.is_live(first, 2 * MIB) && !device.is_live(first, 2 * MIB + 1));
        device.free(first).expect("was allocated");
        assert_eq!((device.free(first), device.free_bytes()), (Err(Code::INVALID_VALUE), 60 * MIB));
    }

    #[test]
    fn maps_handles_into_a_reservation_and_takes_them_out() {
        let mut device = device(64 * MIB);
        let mut physical = Physical::default();
        let at = device.reserve(40 * MIB).expect("address space");
        let handle = physical.create(&mut device, 0, 20 * MIB).expect("fits");
        device.map(at + 20 * MIB, 20 * MIB, handle, &mut physical).expect("free");
        assert_eq!(device.map(at + 10 * MIB, 20 * MIB, handle, &mut physical), Err(Code::INVALID_VALUE));
        assert!(!device.is_live(at + 20 * MIB, 1));
        device.set_access(at + 20 * MIB, 20 * MIB, true).expect("mapped");
        assert!(device.is_live(at + 30 * MIB, 10 * MIB) && !device.is_live(at, 1));
        assert_eq!(device.release_reservation(at, 40 * MIB), Err(Code::INVALID_VALUE));
        physical.release(&mut device, handle).expect("known");
        assert_eq!(device.free_bytes(), 40 * MIB);
        assert_eq!(device.unmap(at + 20 * MIB, 10 * MIB).err(), Some(Code::INVALID_VALUE));
        for handle in device.unmap(at + 20 * MIB, 20 * MIB).expect("mapped") {
            physical.unmapped(&mut device, handle);
        }
        assert_eq!(device.free_bytes(), 60 * MIB);
        device.release_reservation(at, 40 * MIB).expect("empty");
    }
}
