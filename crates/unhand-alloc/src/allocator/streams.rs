//! Streams by index: handles are arbitrary 64-bit numbers, everything inside uses small indices.

use rustc_hash::FxHashMap;

use crate::block::StreamIndex;
use crate::device::StreamId;

/// The streams met so far, in order of first use.
#[derive(Debug)]
pub(super) struct Streams {
    handles: Vec<StreamId>,
    by_handle: FxHashMap<StreamId, StreamIndex>,
    last: (StreamId, StreamIndex),
}

impl Default for Streams {
    fn default() -> Self {
        let default = (StreamId::DEFAULT, StreamIndex(0));
        Streams { handles: vec![default.0], by_handle: FxHashMap::from_iter([default]), last: default }
    }
}

impl Streams {
    #[inline]
    pub(super) fn index(&mut self, stream: StreamId) -> StreamIndex {
        if self.last.0 != stream {
            self.last = (stream, self.look_up(stream));
        }
        self.last.1
    }

    #[cold]
    fn look_up(&mut self, stream: StreamId) -> StreamIndex {
        let next = StreamIndex(u32::try_from(self.handles.len()).expect("fewer than 2^32 streams"));
        let index = *self.by_handle.entry(stream).or_insert(next);
        if index == next {
            self.handles.push(stream);
        }
        index
    }

    #[inline]
    pub(super) fn handle(&self, index: StreamIndex) -> StreamId {
        self.handles[index.0 as usize]
    }

    /// All streams, ordered by handle as unsigned integers.
    pub(super) fn in_order(&self) -> impl Iterator<Item = StreamIndex> {
        let mut all: Vec<(StreamId, StreamIndex)> =
            self.by_handle.iter().map(|(id, index)| (*id, *index)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, index)| index)
    }
}
