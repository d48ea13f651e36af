//! From the address of an object to its node: millions of them, asked several times each.

use rustc_hash::FxHashMap;

use crate::Node;

/// Objects begin at multiples of this many bytes: what CPython and the C library allocate does.
const STEP_BITS: u32 = 4;

/// One table is for this much of the address space: 1 MiB, so that a large heap has a few hundred tables.
const SPAN_BITS: u32 = 20;

const SLOTS: usize = 1 << (SPAN_BITS - STEP_BITS);

/// Which node is at which address.
///
/// A table for each span of addresses, with a slot for each place where an object may begin. Objects that lie together
/// have their slots together, and to find one out of order costs one miss of the cache instead of the two or three of
/// a hash table with millions of keys. A slot is 4 bytes for 16 bytes of address space, and pages of a table that are
/// never written take no memory. Addresses in between, which few static objects have, are in a hash table.
#[derive(Debug, Default)]
pub struct Places {
    table_of: FxHashMap<usize, u32>,
    /// One more than the node; 0 where there is none.
    tables: Vec<Box<[u32]>>,
    between: FxHashMap<usize, Node>,
    /// The span that was written to last, and its table: objects are listed in the order they were made.
    last: Option<(usize, u32)>,
}

impl Places {
    /// No places.
    pub fn new() -> Places {
        Places::default()
    }

    /// The node at an address. O(1).
    #[inline]
    pub fn get(&self, address: usize) -> Option<Node> {
        let Some((span, slot)) = split(address) else { return self.between.get(&address).copied() };
        let table = *self.table_of.get(&span)?;
        self.tables[table as usize][slot].checked_sub(1)
    }

    /// Puts a node at an address, unless there is one. Whether there was none. Nodes are below 2^31, as in a
    /// [`Graph`](crate::Graph). O(1).
    #[inline]
    pub fn insert(&mut self, address: usize, node: Node) -> bool {
        let Some((span, slot)) = split(address) else {
            if self.between.contains_key(&address) {
                return false;
            }
            self.between.insert(address, node);
            return true;
        };
        let table = match self.last {
            Some((last, table)) if last == span => table,
            _ => self.open(span),
        };
        let place = &mut self.tables[table as usize][slot];
        let is_new = *place == 0;
        if is_new {
            *place = node + 1;
        }
        is_new
    }

    /// The table of a span, made if need be, which is then the last.
    fn open(&mut self, span: usize) -> u32 {
        let tables = &mut self.tables;
        let table = *self.table_of.entry(span).or_insert_with(|| {
            tables.push(vec![0; SLOTS].into_boxed_slice());
            crate::narrow(tables.len() - 1)
        });
        self.last = Some((span, table));
        table
    }
}

/// The span of an address and the slot there; nothing for an address between two slots.
#[inline]
fn split(address: usize) -> Option<(usize, usize)> {
    let is_between = address & ((1 << STEP_BITS) - 1) != 0;
    (!is_between).then_some((address >> SPAN_BITS, address >> STEP_BITS & (SLOTS - 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_put_there_and_nothing_beside_it() {
        let span = 1 << SPAN_BITS;
        // The ends of spans, places between two slots, far apart, and the first of all.
        let addresses =
            [0, 16, 17, 24, span - 16, span - 8, span, 7 * span + 32, usize::MAX, usize::MAX & !15];
        let mut places = Places::new();
        for (node, &address) in (0..).zip(&addresses) {
            assert_eq!(places.get(address), None, "{address:#x}");
            assert!(places.insert(address, node), "{address:#x}");
        }
        for (node, &address) in (0..).zip(&addresses) {
            assert!(!places.insert(address, 99), "{address:#x}");
            assert_eq!(places.get(address), Some(node), "{address:#x}");
        }
        for address in [1, 32, span + 16, 3 * span, 8 * span + 32] {
            assert_eq!(places.get(address), None, "{address:#x}");
        }
    }

    #[test]
    fn agrees_with_a_hash_table() {
        let (mut places, mut expected) = (Places::new(), FxHashMap::default());
        let mut state = 7_usize;
        for node in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // A small range, so that some addresses come twice.
            let address = state >> 40 & !7;
            let is_new = !expected.contains_key(&address);
            expected.entry(address).or_insert(node);
            assert_eq!(places.insert(address, node), is_new);
        }
        for address in (0..1 << 24).step_by(8) {
            assert_eq!(places.get(address), expected.get(&address).copied());
        }
    }
}
