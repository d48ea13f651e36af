//! Where the driver puts memory: a model of its address space, good enough that address ties break alike.
//!
//! Read off recordings of `cudaMalloc` on an H200: address space is taken in chunks of the request rounded up
//! to 32 MiB, each below the ones before; a request first takes the lowest address that fits inside an existing
//! chunk; an empty chunk is given back, and its range may hold a later chunk. Where the first segments of a
//! process land also depends on holes in the context's own layout, which nobody outside the driver knows.

use std::collections::BTreeMap;

/// Sizes are rounded up to this many bytes.
const GRAIN: u64 = 2 << 20;
/// Chunks are multiples of this many bytes.
const CHUNK: u64 = 32 << 20;
/// The first chunk ends here.
const TOP: u64 = 0x7f00_0000_0000;
/// Reservations of address space begin here and go up.
const RESERVATIONS: u64 = 0x2_0000_0000;

/// Bytes that `bytes` take up on the device.
pub(crate) fn grain(bytes: u64) -> u64 {
    bytes.div_ceil(GRAIN).max(1) * GRAIN
}

/// Free ranges inside chunks, and the chunks, by address.
#[derive(Debug, Default)]
pub struct Placement {
    /// First byte → bytes, of every chunk.
    chunks: BTreeMap<u64, u64>,
    /// First byte → bytes, of every free range; no range spans two chunks.
    free: BTreeMap<u64, u64>,
    /// First byte → bytes, of every reservation.
    reservations: BTreeMap<u64, u64>,
}

impl Placement {
    /// An address for `bytes` of plain memory.
    pub fn place(&mut self, bytes: u64) -> u64 {
        let bytes = grain(bytes);
        let fits =
            self.free.iter().find(|(_, free)| **free >= bytes).map(|(address, free)| (*address, *free));
        let (address, free) = fits.unwrap_or_else(|| self.new_chunk(bytes));
        self.free.remove(&address);
        if free > bytes {
            self.free.insert(address + bytes, free - bytes);
        }
        address
    }

    /// Takes a given range, a chunk of its own. Returns false, and takes nothing, when part of it is taken.
    pub fn occupy(&mut self, address: u64, bytes: u64) -> bool {
        let bytes = grain(bytes);
        let below = self.chunks.range(..address.saturating_add(bytes)).next_back();
        if below.is_some_and(|(start, size)| start + size > address) {
            return false;
        }
        self.chunks.insert(address, bytes);
        true
    }

    /// The highest gap below `TOP` that holds a chunk.
    fn new_chunk(&mut self, bytes: u64) -> (u64, u64) {
        let size = bytes.div_ceil(CHUNK) * CHUNK;
        let mut ceiling = TOP;
        for (&start, &chunk) in self.chunks.iter().rev() {
            if ceiling.saturating_sub(start + chunk) >= size {
                break;
            }
            ceiling = ceiling.min(start);
        }
        let address = ceiling.saturating_sub(size);
        self.chunks.insert(address, size);
        self.free.insert(address, size);
        (address, size)
    }

    /// Gives back what [`place`](Placement::place) returned.
    pub fn remove(&mut self, address: u64, bytes: u64) {
        let mut start = address;
        let mut end = address + grain(bytes);
        let Some((&chunk, &chunk_bytes)) = self.chunks.range(..=address).next_back() else { return };
        if let Some((&before, &size)) = self.free.range(chunk..address).next_back()
            && before + size == address
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some((&after, &size)) = self.free.range(address..chunk + chunk_bytes).next()
            && after == end
        {
            self.free.remove(&after);
            end += size;
        }
        if start == chunk && end == chunk + chunk_bytes {
            self.chunks.remove(&chunk);
        } else {
            self.free.insert(start, end - start);
        }
    }

    /// The lowest free range for a reservation of `bytes`.
    pub fn reserve(&mut self, bytes: u64) -> u64 {
        let bytes = grain(bytes);
        let mut floor = RESERVATIONS;
        for (&start, &size) in &self.reservations {
            if start.saturating_sub(floor) >= bytes {
                break;
            }
            floor = floor.max(start + size);
        }
        self.reservations.insert(floor, bytes);
        floor
    }

    /// Takes a given address for a reservation.
    pub fn reserve_at(&mut self, address: u64, bytes: u64) {
        self.reservations.insert(address, grain(bytes));
    }

    /// Gives a reservation back.
    pub fn release_reservation(&mut self, address: u64) {
        self.reservations.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn fills_chunks_from_below_and_stacks_chunks_downwards() {
        let mut placement = Placement::default();
        let first = placement.place(20 * MIB);
        assert_eq!(first, TOP - 32 * MIB);
        assert_eq!(placement.place(12 * MIB), first + 20 * MIB);
        let second = placement.place(2 * MIB);
        assert_eq!(second, TOP - 64 * MIB);
        placement.remove(first, 20 * MIB);
        // The lowest address that fits, even in an older chunk.
        assert_eq!(placement.place(30 * MIB), second + 2 * MIB);
        assert_eq!(placement.place(2 * MIB), first);
    }

    #[test]
    fn gives_empty_chunks_back() {
        let mut placement = Placement::default();
        let first = placement.place(64 * MIB);
        let second = placement.place(32 * MIB);
        placement.remove(first, 64 * MIB);
        assert_eq!(placement.place(48 * MIB), first);
        placement.remove(first, 48 * MIB);
        placement.remove(second, 32 * MIB);
        assert!(placement.chunks.is_empty() && placement.free.is_empty());
    }

    #[test]
    fn reuses_the_lowest_reservation() {
        let mut placement = Placement::default();
        let (first, second) = (placement.reserve(10 * MIB), placement.reserve(10 * MIB));
        placement.release_reservation(first);
        assert_eq!(placement.reserve(20 * MIB), second + 10 * MIB);
        assert_eq!(placement.reserve(10 * MIB), first);
    }
}
