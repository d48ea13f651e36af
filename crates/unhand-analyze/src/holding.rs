//! Who holds memory at one moment: blocks gathered by the line that allocated them.

use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use unhand_snapshot::{PoolId, Snapshot, StackId};

use crate::category::{
    CUBLAS_WORKSPACE_SIZES, CUBLASLT_WORKSPACE_SIZE, Category, LifeHints, is_cublas_workspace, is_zero_grad,
};
use crate::site::{FrameText, Site, SiteId, Sites};
use crate::timeline::{Life, Timeline};

/// The blocks active at one moment, by holder.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Holding {
    /// Requested bytes of all blocks.
    pub requested_bytes: u64,
    /// Bytes of the blocks that serve them. At a moment inside the history this is the least they can be.
    pub allocated_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// What the blocks are for, largest first; `None` when no stacks were recorded.
    pub categories: Option<Vec<CategoryShare>>,
    /// The holders, largest first.
    pub holders: Vec<Holder>,
}

/// The part of one category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryShare {
    /// The category.
    pub category: Category,
    /// Number of blocks.
    pub blocks: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
}

/// Blocks that one line allocated for one purpose.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The line, or why there is none.
    pub site: Site,
    /// What the blocks are for; `None` when no stacks were recorded.
    pub category: Option<Category>,
    /// The stream, when holders are gathered by stream and pool for want of stacks.
    pub stream: Option<u64>,
    /// The memory pool, when holders are gathered by stream and pool for want of stacks.
    pub pool: Option<(u64, u64)>,
    /// Number of blocks.
    pub blocks: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Bytes of the blocks (see [`Holding::allocated_bytes`]).
    pub allocated_bytes: u64,
    /// The commonest sizes, largest total first, at most five.
    pub sizes: Vec<SizeShare>,
    /// Microseconds from the allocation of the oldest block to the moment; `None` when that was before the
    /// history began, or no times were recorded.
    pub oldest_age_us: Option<i64>,
    /// The stacks that lead to the line, largest first; empty unless asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<HeldStack>,
}

/// Blocks of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SizeShare {
    /// Requested bytes of each block.
    pub each_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// The blocks of one stack.
#[derive(Clone, Debug, Serialize)]
pub struct HeldStack {
    /// Number of blocks.
    pub blocks: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The frames, innermost first.
    pub frames: Vec<FrameText>,
}

/// The name of the site of blocks that lived before the history began.
pub const BEFORE_HISTORY: &str = "(allocated before the history began)";

/// One block to be gathered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldBlock {
    pub(crate) stack: StackId,
    pub(crate) category: Category,
    pub(crate) is_older: bool,
    pub(crate) requested_bytes: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) stream: u64,
    pub(crate) pool: PoolId,
    pub(crate) age_us: Option<i64>,
}

/// What the whole history says about single blocks, looked up often.
#[derive(Debug, Default)]
pub(crate) struct LifeFacts {
    /// Stack, size and address of blocks that may be cuBLAS workspaces.
    workspaces: FxHashSet<(StackId, u64, u64)>,
    zero_grad: FxHashMap<StackId, bool>,
}

impl LifeFacts {
    pub(crate) fn of(timeline: Option<&Timeline>) -> Self {
        // Of each stack and size: the first block, and how many were kept.
        let mut seen: FxHashMap<(StackId, u64), (&Life, u32)> = FxHashMap::default();
        let lives = timeline.iter().flat_map(|t| &t.lives);
        for life in lives.filter(|life| {
            is_cublas_workspace(life.requested_bytes) || life.requested_bytes == CUBLASLT_WORKSPACE_SIZE
        }) {
            let entry = seen.entry((life.stack, life.requested_bytes)).or_insert((life, 0));
            entry.1 += u32::from(life.survives());
        }
        let alone = |(first, kept): &(&Life, u32)| *kept == 1 && first.survives();
        let is_workspace = |&((stack, bytes), ref found): &((StackId, u64), (&Life, u32))| {
            // The small one of cuBLASLt is made at the same matrix product as the large one of cuBLAS.
            let beside = |size| seen.get(&(stack, size)).is_some_and(alone);
            alone(found) && (is_cublas_workspace(bytes) || CUBLAS_WORKSPACE_SIZES.into_iter().any(beside))
        };
        let workspaces = seen
            .iter()
            .map(|(&key, &found)| (key, found))
            .filter(is_workspace)
            .map(|((stack, bytes), (first, _))| (stack, bytes, first.address))
            .collect();
        LifeFacts { workspaces, zero_grad: FxHashMap::default() }
    }

    pub(crate) fn category(&mut self, snapshot: &Snapshot, sites: &mut Sites<'_>, life: &Life) -> Category {
        if !sites.has_stacks() || (life.born().is_none() && life.stack.is_none()) {
            return Category::Unknown;
        }
        let (_, told) = sites.of(life.stack);
        let free_stack = life.free_stack;
        let freed_by_zero_grad = *self.zero_grad.entry(free_stack).or_insert_with(|| {
            !free_stack.is_none()
                && snapshot
                    .stacks
                    .frames(free_stack)
                    .any(|frame| is_zero_grad(snapshot.strings.get(snapshot.stacks.frame(frame).name)))
        });
        told.refined(&LifeHints {
            freed_by_zero_grad,
            is_workspace: life.survives()
                && self.workspaces.contains(&(life.stack, life.requested_bytes, life.address)),
        })
    }
}

#[derive(Default)]
struct Gathered {
    blocks: u64,
    requested_bytes: u64,
    allocated_bytes: u64,
    oldest_age_us: Option<i64>,
    has_undated: bool,
    sizes: FxHashMap<u64, u64>,
    stacks: FxHashMap<StackId, (u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key {
    Line(SiteId, Category),
    Older(Category),
    Place(PoolId, u64),
}

pub(crate) fn gather(
    sites: &mut Sites<'_>,
    blocks: impl IntoIterator<Item = HeldBlock>,
    with_stacks: bool,
) -> Holding {
    let mut groups: FxHashMap<Key, Gathered> = FxHashMap::default();
    let mut categories: FxHashMap<Category, (u64, u64)> = FxHashMap::default();
    let mut holding = Holding::default();
    for block in blocks {
        let key = if !sites.has_stacks() {
            Key::Place(block.pool, block.stream)
        } else if block.is_older && block.stack.is_none() {
            Key::Older(block.category)
        } else {
            Key::Line(sites.of(block.stack).0, block.category)
        };
        holding.blocks += 1;
        holding.requested_bytes += block.requested_bytes;
        holding.allocated_bytes += block.allocated_bytes;
        let share = categories.entry(block.category).or_default();
        share.0 += 1;
        share.1 += block.requested_bytes;
        let group = groups.entry(key).or_default();
        group.blocks += 1;
        group.requested_bytes += block.requested_bytes;
        group.allocated_bytes += block.allocated_bytes;
        group.oldest_age_us = group.oldest_age_us.max(block.age_us);
        group.has_undated |= block.age_us.is_none();
        *group.sizes.entry(block.requested_bytes).or_default() += 1;
        let stack = group.stacks.entry(block.stack).or_default();
        stack.0 += 1;
        stack.1 += block.requested_bytes;
    }

    let mut groups: Vec<(Key, Gathered)> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.requested_bytes.cmp(&a.1.requested_bytes).then(a.0.cmp(&b.0)));
    let has_stacks = sites.has_stacks();
    holding.holders =
        groups.into_iter().map(|(key, group)| group.into_holder(key, sites, with_stacks)).collect();
    if has_stacks {
        let mut shares: Vec<CategoryShare> = categories
            .into_iter()
            .map(|(category, (blocks, requested_bytes))| CategoryShare { category, blocks, requested_bytes })
            .collect();
        shares.sort_by(|a, b| b.requested_bytes.cmp(&a.requested_bytes).then(a.category.cmp(&b.category)));
        holding.categories = Some(shares);
    }
    holding
}

impl Gathered {
    fn into_holder(self, key: Key, sites: &mut Sites<'_>, with_stacks: bool) -> Holder {
        let (site, category, place) = match key {
            Key::Line(site, category) => (sites.get(site).clone(), Some(category), None),
            Key::Older(category) => (Site::without_line(BEFORE_HISTORY), Some(category), None),
            Key::Place(pool, stream) => {
                (Site::without_line(crate::site::NO_STACK_RECORDED), None, Some((pool, stream)))
            }
        };
        let mut commonest: Vec<SizeShare> =
            self.sizes.into_iter().map(|(each_bytes, blocks)| SizeShare { each_bytes, blocks }).collect();
        commonest.sort_by_key(|s| std::cmp::Reverse((s.each_bytes.saturating_mul(s.blocks), s.each_bytes)));
        commonest.truncate(5);
        let mut stacks = Vec::new();
        if with_stacks && place.is_none() {
            let mut by_stack: Vec<_> = self.stacks.into_iter().collect();
            by_stack.sort_by_key(|&(stack, (_, bytes))| (std::cmp::Reverse(bytes), stack));
            stacks = by_stack
                .into_iter()
                .map(|(stack, (blocks, requested_bytes))| HeldStack {
                    blocks,
                    requested_bytes,
                    frames: sites.frames(stack),
                })
                .collect();
        }
        Holder {
            site,
            category,
            stream: place.map(|(_, stream)| stream),
            pool: place.map(|(pool, _)| (pool.0, pool.1)),
            blocks: self.blocks,
            requested_bytes: self.requested_bytes,
            allocated_bytes: self.allocated_bytes,
            sizes: commonest,
            oldest_age_us: self.oldest_age_us.filter(|_| !self.has_undated),
            stacks,
        }
    }
}
