//! The event history: a ring of trace entries, as `_record_memory_history` keeps it.

use crate::block::Context;
use crate::device::StreamId;
use crate::pool::PoolId;

/// What happened (PyTorch `TraceEntry::Action`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out; the size is the requested bytes.
    Alloc,
    /// The owner let go of a block.
    FreeRequested,
    /// The block is back in its pool.
    FreeCompleted,
    /// A segment came from the device.
    SegmentAlloc,
    /// A segment went back to the device.
    SegmentFree,
    /// Pages of an expandable segment were mapped.
    SegmentMap,
    /// Pages of an expandable segment were unmapped.
    SegmentUnmap,
    /// A snapshot was taken; the size is the active bytes.
    Snapshot,
    /// Out of memory; the address is the device's free bytes, the size the rounded request.
    Oom,
    /// The program said something about a live block (2.14+); the size is the requested bytes.
    Annotate,
}

impl Action {
    /// The word PyTorch's snapshots use.
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
            Action::Annotate => "annotate",
        }
    }
}

/// One entry of the history; see [`Action`] for what the numbers mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// What happened.
    pub action: Action,
    /// The address, or the device's free bytes for [`Action::Oom`].
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The stream of the block.
    pub stream: StreamId,
    /// Microseconds since the epoch.
    pub time_us: i64,
    /// The pool the block belongs to.
    pub pool_id: PoolId,
    /// What the caller attached, if the level keeps it.
    pub context: Option<Context>,
}

/// Which contexts are kept, each level more than the one before (`RecordContext`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum HistoryLevel {
    /// No contexts.
    #[default]
    Never,
    /// On live blocks.
    State,
    /// Also in trace entries; a free repeats the allocation's.
    Alloc,
    /// A free has its own.
    All,
}

/// A ring of trace entries. Like PyTorch's it is not laid out anew when its size changes, so entries read after
/// that are not in order of time.
#[derive(Debug, Default)]
pub(crate) struct History {
    enabled: bool,
    pub(crate) level: HistoryLevel,
    /// One bit per action that is not stored.
    skipped: u16,
    entries: Vec<TraceEntry>,
    most: usize,
    next: usize,
}

impl History {
    pub(crate) fn record(&mut self, on: bool, level: HistoryLevel, max_entries: usize, clear: bool) {
        self.enabled = on;
        self.level = if on { level } else { HistoryLevel::Never };
        self.most = max_entries.max(1);
        if !on || clear {
            self.entries.clear();
            self.next = 0;
        }
    }

    /// Actions that are not stored from now on (`skip_actions`, 2.11+).
    pub(crate) fn skip(&mut self, actions: &[Action]) {
        self.skipped = actions.iter().fold(0, |bits, action| bits | 1 << *action as u16);
    }

    #[inline]
    pub(crate) fn stores(&self, action: Action) -> bool {
        self.enabled && self.skipped & (1 << action as u16) == 0
    }

    pub(crate) fn push(&mut self, mut entry: TraceEntry) {
        if self.level < HistoryLevel::Alloc {
            entry.context = None;
        }
        if self.entries.len() < self.most {
            self.entries.push(entry);
        } else {
            self.entries[self.next] = entry;
            self.next += 1;
            if self.next == self.most {
                self.next = 0;
            }
        }
    }

    /// The entries, the oldest first as far as the ring knows.
    pub(crate) fn entries(&self) -> Vec<TraceEntry> {
        let (new, old) = self.entries.split_at(self.next.min(self.entries.len()));
        [old, new].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(time_us: i64) -> TraceEntry {
        TraceEntry {
            action: Action::Alloc,
            address: 0,
            size: 0,
            stream: StreamId(0),
            time_us,
            pool_id: PoolId::DEFAULT,
            context: Context::new(1),
        }
    }

    #[test]
    fn wraps_and_reads_the_oldest_first() {
        let mut history = History::default();
        history.record(true, HistoryLevel::Alloc, 3, false);
        (0..5).for_each(|time| history.push(entry(time)));
        let times: Vec<i64> = history.entries().iter().map(|entry| entry.time_us).collect();
        assert_eq!(times, [2, 3, 4]);
    }

    #[test]
    fn keeps_contexts_only_from_level_alloc_on() {
        let mut history = History::default();
        history.record(true, HistoryLevel::State, 3, false);
        history.push(entry(0));
        assert_eq!(history.entries()[0].context, None);
    }
}
