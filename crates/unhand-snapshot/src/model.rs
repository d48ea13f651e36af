//! What a snapshot says, as columns and plain structs. No reading or writing here.

use std::fmt;

/// An interned string of one [`Snapshot`]. `StringId(0)` is the empty string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StringId(pub u32);

/// An interned frame of one [`Snapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameId(pub u32);

/// An interned call stack of one [`Snapshot`]: a node of the stack trie. `StackId(0)` is "no stack".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    /// The stack of an entry that was recorded without one.
    pub const NONE: StackId = StackId(0);
    /// Whether no stack was recorded.
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// The id of a memory pool: two 64-bit numbers, `(0, 0)` for the default pools
/// (PyTorch `MempoolId_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u64, pub u64);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// What a trace entry says happened (PyTorch `TraceEntry::Action`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Action {
    /// A block was handed out; `size` is the *requested* bytes.
    Alloc,
    /// The owner let go of a block; it may still wait for other streams.
    FreeRequested,
    /// The block is back in the pool.
    FreeCompleted,
    /// `free` of old snapshots: requested and completed in one.
    Free,
    /// A segment came from the driver.
    SegmentAlloc,
    /// A segment went back to the driver.
    SegmentFree,
    /// Pages of an expandable segment were mapped.
    SegmentMap,
    /// Pages of an expandable segment were unmapped.
    SegmentUnmap,
    /// A snapshot was taken; `size` is the active bytes.
    Snapshot,
    /// An out-of-memory error; `addr` holds the device's free bytes, `size` the rounded request.
    Oom,
    /// A user annotation of a live block (2.14 and later).
    Annotate,
    /// A name this version does not know; it is kept in [`Event::action_name`].
    Other,
}

/// One entry of a device's history, by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// The address; for [`Action::Oom`] the device's free bytes instead (`device_free`).
    pub addr: u64,
    /// Bytes, see [`Action`].
    pub size: u64,
    /// The raw stream handle.
    pub stream: u64,
    /// Microseconds since the epoch; `None` in files of torch before 2.3.
    pub time_us: Option<i64>,
    /// The stack, or [`StackId::NONE`].
    pub stack: StackId,
    /// `compile_context`; the empty string when absent.
    pub compile_context: StringId,
    /// `user_metadata`; the empty string when absent.
    pub user_metadata: StringId,
    /// `pool_id`; `None` up to torch 2.11.
    pub pool_id: Option<PoolId>,
    /// The action's own text, only for [`Action::Other`].
    pub action_name: StringId,
}
