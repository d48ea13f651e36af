//! Pinned host memory: allocated here, or registered where it is.

use std::collections::BTreeMap;

use crate::code::{Code, Outcome};
use crate::sys;

/// What the program has pinned.
#[derive(Default)]
pub(crate) struct HostMemory {
    ranges: BTreeMap<u64, Range>,
}

/// One range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) origin: Origin,
    pub(crate) device: i32,
}

/// How a range came to be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cudaHostAlloc`
    Allocated,
    /// `cudaHostRegister`
    Registered,
    /// `cudaMallocManaged`: one memory for both sides, as all memory here is.
    Managed,
}

impl HostMemory {
    /// New pinned or managed memory.
    pub(crate) fn allocate(&mut self, bytes: u64, origin: Origin, device: i32) -> Result<u64, Code> {
        let start = sys::allocate_host(bytes).ok_or(Code::OUT_OF_MEMORY)?;
        self.ranges.insert(start, Range { start, bytes, origin, device });
        Ok(start)
    }

    /// Forgets an allocation. The caller unmaps it.
    pub(crate) fn take(&mut self, start: u64) -> Result<Range, Code> {
        match self.ranges.get(&start) {
            Some(range) if range.origin != Origin::Registered => {
                let range = *range;
                self.ranges.remove(&start);
                Ok(range)
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Pins memory of the program's own.
    pub(crate) fn register(&mut self, start: u64, bytes: u64, device: i32) -> Outcome {
        if bytes == 0 || start == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let below = self.ranges.range(..start.saturating_add(bytes)).next_back();
        if below.is_some_and(|(_, range)| range.start + range.bytes > start) {
            return Err(Code::HOST_ALREADY_REGISTERED);
        }
        self.ranges.insert(start, Range { start, bytes, origin: Origin::Registered, device });
        Ok(())
    }

    /// Unpins it.
    pub(crate) fn unregister(&mut self, start: u64) -> Outcome {
        match self.ranges.get(&start) {
            Some(range) if range.origin == Origin::Registered => {
                self.ranges.remove(&start);
                Ok(())
            }
            _ => Err(Code::HOST_NOT_REGISTERED),
        }
    }

    /// The range an address is in.
    pub(crate) fn find(&self, address: u64) -> Option<Range> {
        let (_, range) = self.ranges.range(..=address).next_back()?;
        (address < range.start + range.bytes.max(1)).then_some(*range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_what_is_pinned() {
        let mut host = HostMemory::default();
        host.register(0x10_000, 4096, 0).expect("free");
        assert_eq!(host.register(0x10_fff, 1, 0), Err(Code::HOST_ALREADY_REGISTERED));
        assert!(host.find(0x10_fff).is_some() && host.find(0x11_000).is_none());
        assert_eq!(host.take(0x10_000), Err(Code::INVALID_VALUE));
        assert_eq!(
            (host.unregister(0x10_001), host.unregister(0x10_000)),
            (Err(Code::HOST_NOT_REGISTERED), Ok(()))
        );
    }
}
