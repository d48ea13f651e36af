//! What of the cache can be given back, and which live blocks pin the rest.

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{Block, BlockState, PoolId, Segment, SegmentKind, Snapshot, StackId};

use crate::category::is_cublas_workspace;
use crate::prose::plural;
use crate::rounding::Rounding;
use crate::site::{SiteId, Sites};
use unhand_alloc::Bytes;

/// Reserved bytes in which no block lives, and why they are still reserved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Cache {
    /// All of them: returnable, stuck and kept by pools together.
    pub cached_bytes: u64,
    /// What `torch.cuda.empty_cache()` gives back: whole free segments, whole free pages of expandable ones.
    pub returnable_bytes: u64,
    /// What lies beside a live block in its segment or page.
    pub stuck_bytes: u64,
    /// Whole free segments and pages of private pools. They go back only after the pool's owner (a CUDA
    /// graph, a `MemPool`) is gone.
    pub kept_by_pools_bytes: u64,
    /// Segments with stuck memory, the largest loss first.
    pub stuck: Vec<StuckSegment>,
    /// The stuck segments gathered by the lines that allocated their live blocks, the largest loss first.
    pub pinned_by: Vec<PinGroup>,
}

/// A segment whose free part cannot go back.
#[derive(Clone, Debug, Serialize)]
pub struct StuckSegment {
    /// Its address.
    pub address: u64,
    /// Its bytes.
    pub total_bytes: u64,
    /// Bytes that are pinned: all of it, or of an expandable segment the pages with both live and free bytes.
    pub pinned_bytes: u64,
    /// Its free bytes that cannot go back.
    pub stuck_bytes: u64,
    /// The stream it serves (raw handle).
    pub stream: u64,
    /// Its memory pool.
    pub pool: (u64, u64),
    /// Whether it is expandable; then only the pages with both live and free bytes count as stuck.
    pub is_expandable: bool,
    /// Whether it belongs to the small pool.
    pub is_small: bool,
    /// The live blocks that pin it, in the order of their addresses.
    pub pins: Vec<Pin>,
}

/// A live block that keeps its segment or page from going back.
#[derive(Clone, Debug, Serialize)]
pub struct Pin {
    /// Its address.
    pub address: u64,
    /// Bytes of the block.
    pub block_bytes: u64,
    /// Bytes that were asked for.
    pub requested_bytes: u64,
    /// Whether it was freed already and waits for another stream.
    pub is_pending: bool,
    /// The line that allocated it; `None` when no stack was recorded.
    pub site: Option<String>,
    /// Whether it has the size of a cuBLAS workspace, which `torch._C._cuda_clearCublasWorkspaces()` releases.
    pub is_workspace_size: bool,
    #[serde(skip)]
    stack: StackId,
}

/// Stuck segments with the same kind of tenants.
#[derive(Clone, Debug, Serialize)]
pub struct PinGroup {
    /// The lines that allocated the live blocks, the largest first; empty when no stacks were recorded.
    pub sites: Vec<String>,
    /// Number of segments.
    pub segments: u64,
    /// Number of their pages, of expandable segments; `None` when there are others among them.
    pub pages: Option<u64>,
    /// Bytes that are pinned (see [`StuckSegment::pinned_bytes`]).
    pub pinned_bytes: u64,
    /// Number of live blocks that pin them.
    pub pins: u64,
    /// Bytes of those blocks.
    pub pin_bytes: u64,
    /// The free bytes in the segments: what comes back when the blocks are made anew elsewhere.
    pub would_return_bytes: u64,
    /// All that as a sentence.
    pub sentence: String,
}

/// Free bytes of one segment by what keeps them.
pub(crate) struct FreeParts {
    pub(crate) returnable_bytes: u64,
    pub(crate) stuck_bytes: u64,
    pinned_bytes: u64,
    /// Pages among them, of an expandable segment.
    pages: Option<u64>,
    pins: Vec<Pin>,
}

impl Cache {
    /// The cache of one device at the time of the snapshot. Needs no history.
    pub fn of_device(snapshot: &Snapshot, device: usize) -> Cache {
        let segments = snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device));
        Cache::of(segments, &Rounding::of(&snapshot.settings), &mut Sites::new(snapshot))
    }

    pub(crate) fn of<'s>(
        segments: impl IntoIterator<Item = &'s Segment>,
        rounding: &Rounding,
        sites: &mut Sites<'_>,
    ) -> Cache {
        let mut cache = Cache::default();
        let mut groups: FxHashMap<Vec<SiteId>, (PinGroup, FxHashMap<u64, u64>)> = FxHashMap::default();
        for segment in segments {
            let mut parts = free_parts(segment, rounding);
            if segment.pool_id == PoolId::default() {
                cache.returnable_bytes += parts.returnable_bytes;
            } else {
                cache.kept_by_pools_bytes += parts.returnable_bytes;
            }
            cache.stuck_bytes += parts.stuck_bytes;
            if parts.stuck_bytes == 0 {
                continue;
            }
            let mut by_site: FxHashMap<SiteId, u64> = FxHashMap::default();
            for pin in &mut parts.pins {
                if sites.has_stacks() {
                    let (site, _) = sites.of(pin.stack);
                    pin.site = Some(sites.get(site).name.clone());
                    *by_site.entry(site).or_default() += pin.block_bytes;
                }
            }
            // Segments are alike when the same lines live in them; which of the lines is larger may differ.
            let mut key: Vec<SiteId> = by_site.keys().copied().collect();
            key.sort_unstable();
            let (group, tally) = groups.entry(key).or_insert_with_key(|key| {
                let mut lines: Vec<SiteId> = key.clone();
                lines.sort_by_key(|line| std::cmp::Reverse(by_site[line]));
                (
                    PinGroup::empty(lines.iter().map(|&line| sites.get(line).place().to_owned()).collect()),
                    FxHashMap::default(),
                )
            });
            group.segments += 1;
            group.pages = group.pages.zip(parts.pages).map(|(sum, n)| sum + n);
            group.pinned_bytes += parts.pinned_bytes;
            group.would_return_bytes += parts.stuck_bytes;
            for pin in &parts.pins {
                group.pins += 1;
                group.pin_bytes += pin.block_bytes;
                *tally.entry(pin.block_bytes).or_default() += 1;
            }
            cache.stuck.push(StuckSegment {
                address: segment.address,
                total_bytes: segment.total_size,
                pinned_bytes: parts.pinned_bytes,
                stuck_bytes: parts.stuck_bytes,
                stream: segment.stream,
                pool: (segment.pool_id.0, segment.pool_id.1),
                is_expandable: segment.is_expandable,
                is_small: is_small(segment),
                pins: parts.pins,
            });
        }
        cache.cached_bytes = cache.returnable_bytes + cache.kept_by_pools_bytes + cache.stuck_bytes;
        cache.stuck.sort_by_key(|s| (std::cmp::Reverse(s.stuck_bytes), s.address));
        cache.pinned_by = groups
            .into_values()
            .map(|(mut group, tally)| {
                let only_size = if tally.len() == 1 { tally.keys().next().copied() } else { None };
                group.sentence = group.say(only_size);
                group
            })
            .collect();
        cache.pinned_by.sort_by(|a, b| {
            b.would_return_bytes.cmp(&a.would_return_bytes).then_with(|| a.sites.cmp(&b.sites))
        });
        cache
    }
}

impl PinGroup {
    fn empty(sites: Vec<String>) -> Self {
        PinGroup {
            sites,
            segments: 0,
            pages: Some(0),
            pinned_bytes: 0,
            pins: 0,
            pin_bytes: 0,
            would_return_bytes: 0,
            sentence: String::new(),
        }
    }

    fn say(&self, only_size: Option<u64>) -> String {
        let them = if self.pins == 1 { "it" } else { "them" };
        let what = match self.pages {
            Some(1) => "1 page".to_owned(),
            Some(n) => plural(n, "page"),
            None => plural(self.segments, "segment"),
        };
        let verb = if what.starts_with("1 ") { "is" } else { "are" };
        let blocks = plural(self.pins, "block");
        let of = only_size.map_or_else(
            || format!(" ({} together)", Bytes(self.pin_bytes)),
            |each| format!(" of {}", Bytes(each)),
        );
        format!(
            "{what} ({}) {verb} pinned by {blocks}{of}{}; re-creating {them} would return {}.",
            Bytes(self.pinned_bytes),
            allocated_at(&self.sites),
            Bytes(self.would_return_bytes)
        )
    }
}

/// ` allocated at a.py:1, b.py:2 and 3 other lines`.
fn allocated_at(sites: &[String]) -> String {
    let (threads, lines): (Vec<&str>, Vec<&str>) =
        sites.iter().map(String::as_str).partition(|site| site.starts_with('('));
    let mut parts: Vec<String> = lines.iter().take(2).map(|&line| line.to_owned()).collect();
    if lines.len() > 2 {
        parts.push(plural(lines.len() as u64 - 2, "other line"));
    }
    if !threads.is_empty() {
        parts.push("threads without Python frames".to_owned());
    }
    let (Some(last), lead) = (parts.pop(), parts.join(", ")) else { return String::new() };
    let all = if lead.is_empty() { last } else { format!("{lead} and {last}") };
    let verb = if lines.is_empty() { "allocated by" } else { "allocated at" };
    format!(" {verb} {all}")
}

pub(crate) fn is_small(segment: &Segment) -> bool {
    segment.kind == SegmentKind::Small
}

pub(crate) fn free_parts(segment: &Segment, rounding: &Rounding) -> FreeParts {
    let free_bytes: u64 =
        segment.blocks.iter().filter(|b| b.state == BlockState::Inactive).map(|b| b.size).sum();
    let is_free = segment.blocks.iter().all(|b| b.state == BlockState::Inactive);
    if is_free || free_bytes == 0 {
        return FreeParts {
            returnable_bytes: free_bytes,
            stuck_bytes: 0,
            pinned_bytes: 0,
            pages: None,
            pins: Vec::new(),
        };
    }
    let pin = |block: &Block| Pin {
        address: block.address,
        block_bytes: block.size,
        requested_bytes: block.requested_size,
        is_pending: block.state == BlockState::ActivePendingFree,
        site: None,
        is_workspace_size: is_cublas_workspace(block.requested_size),
        stack: block.stack,
    };
    let live = segment.blocks.iter().filter(|b| b.state != BlockState::Inactive);
    if !segment.is_expandable {
        return FreeParts {
            returnable_bytes: 0,
            stuck_bytes: free_bytes,
            pinned_bytes: segment.total_size,
            pages: None,
            pins: live.map(pin).collect(),
        };
    }

    // `empty_cache` unmaps the pages that lie entirely inside one free block. A mapped range begins at a page
    // boundary, so pages are counted from its address.
    let page = rounding.page_bytes(is_small(segment)).max(1);
    let mut returnable_bytes = 0;
    let mut mixed = Vec::new();
    for block in segment.blocks.iter().filter(|b| b.state == BlockState::Inactive) {
        let from = block.address.saturating_sub(segment.address);
        let to = from.saturating_add(block.size);
        let (first_whole, past_whole) = (from.div_ceil(page), to / page);
        if past_whole > first_whole {
            returnable_bytes += (past_whole - first_whole) * page;
            if from < first_whole * page {
                mixed.push(first_whole - 1);
            }
            if to > past_whole * page {
                mixed.push(past_whole);
            }
        } else if block.size > 0 {
            mixed.extend(from / page..=(to - 1) / page);
        }
    }
    mixed.sort_unstable();
    mixed.dedup();
    let touches_mixed_page = |block: &&Block| {
        let from = block.address.saturating_sub(segment.address);
        let (first, last) = (from / page, from.saturating_add(block.size.max(1) - 1) / page);
        let at = mixed.partition_point(|&p| p < first);
        mixed.get(at).is_some_and(|&p| p <= last)
    };
    FreeParts {
        returnable_bytes,
        stuck_bytes: free_bytes - returnable_bytes,
        pinned_bytes: mixed.len() as u64 * page,
        pages: Some(mixed.len() as u64),
        pins: live.filter(touches_mixed_page).map(pin).collect(),
    }
}
