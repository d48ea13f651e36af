//! What a snapshot says, as columns and plain structs. No reading or writing here.

use std::fmt;

use crate::{Extra, Stacks, Strings, Trace, Value};

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

/// Which size class a segment serves (PyTorch `segment_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SegmentKind {
    /// Requests up to 1 MiB.
    Small,
    /// All others.
    #[default]
    Large,
}

/// One piece of memory from the driver; of an expandable segment, one contiguous mapped range.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Segment {
    /// The device's index; -1 for pinned host memory.
    pub device: i32,
    /// Where it starts.
    pub address: u64,
    /// Bytes held from the driver; the blocks' sizes add up to it.
    pub total_size: u64,
    /// Bytes of blocks in state [`BlockState::ActiveAllocated`].
    pub allocated_size: u64,
    /// Bytes of blocks that are not [`BlockState::Inactive`].
    pub active_size: u64,
    /// Bytes asked for, over the active blocks.
    pub requested_size: u64,
    /// The raw stream handle; 0 is the default stream.
    pub stream: u64,
    /// Small or large.
    pub kind: SegmentKind,
    /// The memory pool it belongs to.
    pub pool_id: PoolId,
    /// Whether it can grow (`expandable_segments`).
    pub is_expandable: bool,
    /// Who made the segment. Usually [`StackId::NONE`], since only never-split segments keep it.
    pub stack: StackId,
    /// The blocks, by address, without gaps.
    pub blocks: Vec<Block>,
    /// Other keys, and which of the usual ones are absent.
    pub extra: Extra,
}

/// What a block is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// In use (`active_allocated`).
    ActiveAllocated,
    /// Freed by its owner, still waited for by other streams (`active_pending_free`).
    ActivePendingFree,
    /// Free (`inactive`).
    #[default]
    Inactive,
}

/// One block of a segment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// Where it starts. In files of torch 2.0 and before, added up from the sizes.
    pub address: u64,
    /// Rounded bytes.
    pub size: u64,
    /// Bytes asked for; of an inactive block a leftover without meaning.
    pub requested_size: u64,
    /// What it is doing.
    pub state: BlockState,
    /// Who asked for it.
    pub stack: StackId,
    /// Other keys, and which of the usual ones are absent.
    pub extra: Extra,
}

/// Whether an annotation opens or closes a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    /// `START`.
    Start,
    /// `END`.
    End,
    /// Something else; the text is in [`Annotation::extra`].
    #[default]
    Other,
}

/// One end of a `record_function` range that was open while history was on (`external_annotations`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Annotation {
    /// The range's name.
    pub name: StringId,
    /// Which end.
    pub stage: Stage,
    /// The device that was current.
    pub device: i32,
    /// Microseconds since the epoch.
    pub time_us: i64,
    /// Other keys, and which of the usual ones are absent.
    pub extra: Extra,
}

/// The allocator's settings when the snapshot was taken (`allocator_settings`, torch 2.3 and later).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AllocatorSettings {
    /// The last configuration string that was applied (`PYTORCH_CUDA_ALLOC_CONF`).
    pub conf: String,
    /// Bytes above which blocks are not split; `None` for no limit.
    pub max_split_size: Option<u64>,
    /// Share of the allowed memory at which unused segments are collected; 0 for never.
    pub garbage_collection_threshold: f64,
    /// Whether new segments can grow.
    pub expandable_segments: bool,
    /// Divisions between powers of two for rounding, by size class; 0 for the usual rounding.
    pub roundup_power2_divisions: Vec<(u64, u64)>,
    /// Whether the file has settings at all; otherwise the fields above are PyTorch's defaults.
    pub present: bool,
    /// Everything, in the file's order, for writing back.
    pub entries: Vec<(String, Value)>,
}

/// Something about a file that its reader should know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// The data ended early; the model holds what came before.
    Truncated {
        /// Bytes of pickle data there are.
        offset: u64,
    },
    /// Events were not in the order of time (PyTorch's ring after `max_entries` was changed); now they are.
    OrderRepaired {
        /// Whose history; -1 for pinned host memory.
        device: i32,
        /// How many events were earlier than the one before them.
        n_early: usize,
    },
    /// Blocks are freed that the history did not see being handed out: it wrapped, or began late.
    RingWrapped {
        /// Whose history; -1 for pinned host memory.
        device: i32,
        /// The index of the first such event.
        first_index: usize,
    },
    /// Texts that are not valid UTF-8; their bad bytes were replaced by U+FFFD.
    LossyText {
        /// How many such texts.
        n_texts: u64,
        /// Where the first one is.
        offset: u64,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::Truncated { offset } => write!(f, "the file is cut off at byte {offset}"),
            Warning::OrderRepaired { device, n_early } => {
                write!(f, "device {device}: {n_early} events were out of order and have been sorted by time")
            }
            Warning::RingWrapped { device, first_index } => write!(
                f,
                "device {device}: event {first_index} frees memory whose allocation was not recorded: \
                 the history wrapped or began late"
            ),
            Warning::LossyText { n_texts, offset } => {
                write!(f, "{n_texts} texts are not UTF-8, the first one at byte {offset}")
            }
        }
    }
}

/// Which keys a file has at its top, for writing the same ones back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub struct Layout {
    /// The file is only a list of segments (`torch.cuda.memory_snapshot()`).
    pub is_segment_list: bool,
    /// `segments` is there.
    pub has_segments: bool,
    /// `device_traces` is there.
    pub has_traces: bool,
    /// `external_annotations` is there (torch 2.5 and later).
    pub has_annotations: bool,
    /// `host_segments` is there (torch 2.14 and later).
    pub has_host_segments: bool,
    /// `host_traces` is there (torch 2.14 and later).
    pub has_host_traces: bool,
}

impl Default for Layout {
    fn default() -> Layout {
        Layout {
            is_segment_list: false,
            has_segments: true,
            has_traces: true,
            has_annotations: true,
            has_host_segments: false,
            has_host_traces: false,
        }
    }
}

/// A memory snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The segments of all devices; each device's are sorted by address.
    pub segments: Vec<Segment>,
    /// The histories (`device_traces`), by device index.
    pub traces: Vec<Trace>,
    /// The allocator's settings.
    pub settings: AllocatorSettings,
    /// User annotations, oldest first.
    pub annotations: Vec<Annotation>,
    /// Pinned host memory (torch 2.14 and later).
    pub host_segments: Vec<Segment>,
    /// Histories of pinned host memory (torch 2.14 and later).
    pub host_traces: Vec<Trace>,
    /// The call stacks all ids refer to.
    pub stacks: Stacks,
    /// The texts all ids refer to.
    pub strings: Strings,
    /// The memory pools that occur in segments or events, sorted.
    pub pools: Vec<PoolId>,
    /// Unknown keys at the top.
    pub extra: Vec<(String, Value)>,
    /// What a reader of the answers should know about the file.
    pub warnings: Vec<Warning>,
    /// The pickle protocol of the file, 2 to 5.
    pub protocol: u8,
    /// Which top keys the file has.
    pub layout: Layout,
}

impl Default for Snapshot {
    fn default() -> Snapshot {
        Snapshot {
            segments: Vec::new(),
            traces: Vec::new(),
            settings: AllocatorSettings::default(),
            annotations: Vec::new(),
            host_segments: Vec::new(),
            host_traces: Vec::new(),
            stacks: Stacks::default(),
            strings: Strings::default(),
            pools: Vec::new(),
            extra: Vec::new(),
            warnings: Vec::new(),
            protocol: 4,
            layout: Layout::default(),
        }
    }
}
