//! Block pools and their owners: the default pools, and private pools of graphs and `MemPool`s.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::{BlockId, PoolIndex};
use crate::device::{SegmentSource, StreamId};
use crate::free_set::FreeSet;
use crate::size::PoolKind;

/// The id of a memory pool, `(0, 0)` for the default pools (PyTorch `MempoolId_t`): `(n, 0)` for CUDA graphs,
/// `(0, n)` for pools a user made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The default pools.
    pub const DEFAULT: PoolId = PoolId(0, 0);

    /// Whether this names the default pools.
    pub fn is_default(self) -> bool {
        self == PoolId::DEFAULT
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// A number that stays with one thread, to route that thread's requests to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadToken(u64);

impl ThreadToken {
    /// The calling thread's token.
    pub fn current() -> ThreadToken {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static TOKEN: ThreadToken = ThreadToken(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        TOKEN.with(|token| *token)
    }
}

/// Which requests a pool takes while it is diverted to (the filter of `beginAllocateToPool`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Every request.
    All,
    /// Requests on one stream (`_cuda_beginAllocateCurrentStreamToPool`).
    Stream(StreamId),
    /// Requests of one thread (`use_mem_pool`).
    Thread(ThreadToken),
}

impl Route {
    pub(crate) fn takes(self, stream: StreamId) -> bool {
        match self {
            Route::All => true,
            Route::Stream(wanted) => wanted == stream,
            Route::Thread(token) => token == ThreadToken::current(),
        }
    }
}

/// How a private pool behaves.
#[derive(Debug, Default)]
pub struct PoolOptions {
    /// Requests of the default pools may take cached blocks from here before they fail (2.8+).
    pub use_on_oom: bool,
    /// Every allocation takes a whole segment (2.10+).
    pub no_split: bool,
    /// Where segments come from, in place of the device.
    pub source: Option<Box<dyn SegmentSource>>,
}

/// One pool of blocks: small or large, of one owner.
#[derive(Debug)]
pub(crate) struct BlockPool {
    pub(crate) kind: PoolKind,
    /// The private pool it belongs to, or the default.
    pub(crate) owner: PoolId,
    pub(crate) free: FreeSet,
    /// Unmapped blocks of expandable segments, by (raw stream, address).
    pub(crate) unmapped: BTreeMap<(StreamId, u64), BlockId>,
    /// Searches so far, only counted while garbage collection is on.
    pub(crate) searches: u64,
}

impl BlockPool {
    pub(crate) fn new(kind: PoolKind, owner: PoolId) -> BlockPool {
        BlockPool { kind, owner, free: FreeSet::default(), unmapped: BTreeMap::new(), searches: 0 }
    }
}

/// A private pool: two block pools with a life of their own.
#[derive(Debug)]
pub(crate) struct PrivatePool {
    pub(crate) small: PoolIndex,
    pub(crate) large: PoolIndex,
    /// Graphs and `MemPool`s that hold it; at 0 it is *freeable*.
    pub(crate) uses: u32,
    /// Segments and grown expandable blocks; never reaches 0 again after growth in several steps, as in PyTorch.
    pub(crate) device_allocs: i64,
    pub(crate) source: Option<Box<dyn SegmentSource>>,
}

impl PrivatePool {
    pub(crate) fn pool(&self, kind: PoolKind) -> PoolIndex {
        match kind {
            PoolKind::Small => self.small,
            PoolKind::Large => self.large,
        }
    }

    pub(crate) fn is_freeable(&self) -> bool {
        self.uses == 0
    }
}
