//! From an address to the block that was handed out there: an open-addressing table of 4-byte ids.
//!
//! The table holds ids only. A lookup reads the block behind an id to compare its address, and that block is
//! what the caller touches next anyway; a general hash map would carry the address a second time.

use crate::block::{Arena, BlockId};

const EMPTY: u32 = 0;
const TOMB: u32 = u32::MAX;

/// Allocated blocks by address.
#[derive(Debug)]
pub(crate) struct AddressTable {
    slots: Vec<u32>,
    live: usize,
    tombs: usize,
    shift: u32,
}

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable { slots: vec![EMPTY; 64], live: 0, tombs: 0, shift: 64 - 6 }
    }
}

impl AddressTable {
    #[inline]
    fn home(&self, address: u64) -> usize {
        // Fibonacci hashing; the low 9 bits of an address carry nothing, so they are dropped first.
        ((address >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    #[inline]
    pub(crate) fn insert(&mut self, address: u64, id: BlockId, arena: &Arena) {
        if (self.live + self.tombs + 1) * 2 > self.slots.len() {
            self.rebuild(arena);
        }
        let mask = self.slots.len() - 1;
        let mut slot = self.home(address);
        while self.slots[slot] != EMPTY && self.slots[slot] != TOMB {
            slot = (slot + 1) & mask;
        }
        if self.slots[slot] == TOMB {
            self.tombs -= 1;
        }
        self.slots[slot] = id.raw();
        self.live += 1;
    }

    #[inline]
    pub(crate) fn find(&self, address: u64, arena: &Arena) -> Option<BlockId> {
        let mask = self.slots.len() - 1;
        let mut slot = self.home(address);
        loop {
            match self.slots[slot] {
                EMPTY => return None,
                TOMB => {}
                raw => {
                    if let Some(id) = BlockId::from_raw(raw)
                        && arena[id].address == address
                    {
                        return Some(id);
                    }
                }
            }
            slot = (slot + 1) & mask;
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, address: u64, id: BlockId) {
        let mask = self.slots.len() - 1;
        let mut slot = self.home(address);
        while self.slots[slot] != id.raw() {
            if self.slots[slot] == EMPTY {
                debug_assert!(false, "a block that was handed out is in the table");
                return;
            }
            slot = (slot + 1) & mask;
        }
        // A slot before an empty one needs no tombstone: no probe runs through it.
        if self.slots[(slot + 1) & mask] == EMPTY {
            self.slots[slot] = EMPTY;
        } else {
            self.slots[slot] = TOMB;
            self.tombs += 1;
        }
        self.live -= 1;
    }

    #[cold]
    fn rebuild(&mut self, arena: &Arena) {
        let capacity = ((self.live + 1) * 4).next_power_of_two().max(64);
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; capacity]);
        self.shift = 64 - capacity.trailing_zeros();
        self.tombs = 0;
        let mask = capacity - 1;
        for id in old.into_iter().filter(|raw| *raw != TOMB).filter_map(BlockId::from_raw) {
            let mut slot = self.home(arena[id].address);
            while self.slots[slot] != EMPTY {
                slot = (slot + 1) & mask;
            }
            self.slots[slot] = id.raw();
        }
    }
}
