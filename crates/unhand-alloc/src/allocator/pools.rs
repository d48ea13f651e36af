//! Private pools: their life, diversions of requests to them, and what counts as a capture.
//!
//! Source: `createOrIncrefPool`, `beginAllocateToPool`, `endAllocateToPool`, `releasePool`, `setUseOnOOM`,
//! `setNoSplit`, `markCaptureBegin`, `is_capture_context`.

use super::DeviceAllocator;
use crate::block::PoolIndex;
use crate::device::{Device, StreamId};
use crate::error::AllocError;
use crate::pool::{BlockPool, PoolId, PoolOptions, PrivatePool, Route};
use crate::size::PoolKind;

impl<D: Device> DeviceAllocator<D> {
    /// Makes a private pool, or takes one more hold of it (`createOrIncrefPool`).
    ///
    /// # Errors
    /// [`AllocError::PoolState`] for the default id, for options with a source on a pool that exists, and for a
    /// pool that was released and is not empty yet.
    pub fn create_pool(&mut self, id: PoolId, options: PoolOptions) -> Result<(), AllocError> {
        if id.is_default() {
            return Err(AllocError::PoolState { id, reason: "the default pools always exist" });
        }
        match self.private.get_mut(&id) {
            Some(_) if options.source.is_some() => {
                return Err(AllocError::PoolState {
                    id,
                    reason: "a segment source is given when a pool is made",
                });
            }
            Some(private) if private.is_freeable() => {
                return Err(AllocError::PoolState { id, reason: "it was released and still holds memory" });
            }
            Some(private) => private.uses += 1,
            None => {
                let small = self.insert_pool(BlockPool::new(PoolKind::Small, id));
                let large = self.insert_pool(BlockPool::new(PoolKind::Large, id));
                let source = options.source;
                self.private.insert(id, PrivatePool { small, large, uses: 1, device_allocs: 0, source });
            }
        }
        if options.use_on_oom {
            self.set_use_on_oom(id, true);
        }
        if options.no_split {
            self.set_no_split(id);
        }
        Ok(())
    }

    fn insert_pool(&mut self, pool: BlockPool) -> PoolIndex {
        if let Some(index) = self.vacant_pools.pop() {
            self.pools[index.0 as usize] = pool;
            return index;
        }
        self.pools.push(pool);
        PoolIndex(u16::try_from(self.pools.len() - 1).expect("fewer than 2^16 pools at a time"))
    }

    /// Lets requests of the default pools use this pool's cached blocks before they fail, or stops that.
    pub fn set_use_on_oom(&mut self, id: PoolId, on: bool) {
        self.use_on_oom.retain(|other| *other != id);
        if on {
            self.use_on_oom.push(id);
        }
    }

    /// Makes every allocation in this pool take a whole segment.
    pub fn set_no_split(&mut self, id: PoolId) {
        self.settle();
        if !self.no_split.contains(&id) {
            self.no_split.push(id);
        }
    }

    /// Sends the requests that `route` takes to a pool, made if need be; one hold more (`beginAllocateToPool`).
    ///
    /// # Errors
    /// [`AllocError::PoolState`] when requests are sent there already, and as [`create_pool`](Self::create_pool).
    pub fn begin_allocate_to_pool(&mut self, id: PoolId, route: Route) -> Result<(), AllocError> {
        self.create_pool(id, PoolOptions::default())?;
        if self.diversions.iter().any(|(other, _)| *other == id) {
            // PyTorch has taken the hold by now, too.
            return Err(AllocError::PoolState { id, reason: "requests are sent to it already" });
        }
        self.diversions.push((id, route));
        Ok(())
    }

    /// Ends what [`begin_allocate_to_pool`](Self::begin_allocate_to_pool) began. The hold stays until
    /// [`release_pool`](Self::release_pool).
    ///
    /// # Errors
    /// [`AllocError::PoolState`] when no requests are sent there.
    pub fn end_allocate_to_pool(&mut self, id: PoolId) -> Result<(), AllocError> {
        let at = self.diversions.iter().position(|(other, _)| *other == id);
        let at = at.ok_or(AllocError::PoolState { id, reason: "no requests are sent to it" })?;
        self.diversions.remove(at);
        Ok(())
    }

    /// Gives up one hold; with the last one the pool becomes freeable: its memory goes back to the device with
    /// the next [`empty_cache`](Self::empty_cache) that finds it free.
    ///
    /// # Errors
    /// [`AllocError::NoSuchPool`].
    pub fn release_pool(&mut self, id: PoolId) -> Result<(), AllocError> {
        let private = self.private.get_mut(&id).filter(|private| !private.is_freeable());
        let private = private.ok_or(AllocError::NoSuchPool(id))?;
        private.uses -= 1;
        if private.is_freeable() {
            self.settle();
            self.freeable.push(id);
            if self.profile.no_split_forgotten {
                self.no_split.retain(|other| *other != id);
            }
        }
        Ok(())
    }

    /// Holds on a pool (`getPoolUseCount`); 0 for one that does not exist.
    pub fn pool_use_count(&self, id: PoolId) -> u32 {
        self.private.get(&id).map_or(0, |private| private.uses)
    }

    /// Erases a private pool that holds nothing any more.
    ///
    /// PyTorch judges by a count that falls too fast for expandable segments, and then frees the pool under its
    /// live blocks. Here a pool stays until no block of it is mapped. A reservation in which nothing is mapped
    /// goes with the pool; its addresses stay reserved on the device, as PyTorch leaves them.
    pub(super) fn forget_pool(&mut self, id: PoolId) {
        let Some(private) = self.private.get(&id) else { return };
        let (small, large) = (private.small, private.large);
        let is_mapped =
            |block: &crate::block::Block| [small, large].contains(&block.pool) && block.is_mapped();
        if self.arena.iter().any(|(_, block)| is_mapped(block)) {
            return;
        }
        for pool in [small, large] {
            let unmapped = std::mem::take(&mut self.pool_mut(pool).unmapped);
            for block in unmapped.into_values() {
                if let Some(segment) = self.arena[block].expandable {
                    self.expandables.remove(segment);
                }
                self.arena.remove(block);
            }
        }
        self.private.remove(&id);
        self.vacant_pools.extend([small, large]);
        self.freeable.retain(|other| *other != id);
    }

    pub(super) fn diverted(&self, stream: StreamId) -> Option<&PrivatePool> {
        let takes = |(_, route): &&(PoolId, Route)| route.takes(stream);
        let (id, _) = if self.profile.last_diversion_wins {
            self.diversions.iter().rev().find(takes)?
        } else {
            self.diversions.iter().find(takes)?
        };
        self.private.get(id)
    }

    /// Whether a pool's segments come from somewhere else than the device.
    pub(super) fn has_source(&self, pool: PoolIndex) -> bool {
        let owner = self.pool(pool).owner;
        !owner.is_default() && self.private.get(&owner).is_some_and(|private| private.source.is_some())
    }

    /// A graph capture has begun on this device (`markCaptureBegin`, 2.13+).
    pub fn mark_capture_begin(&mut self) {
        self.captures += 1;
    }

    /// It has ended.
    pub fn mark_capture_end(&mut self) {
        self.captures = self.captures.saturating_sub(1);
    }

    /// Whether a call that concerns `stream` counts as made inside a capture: no event is polled, frees with
    /// recorded streams wait, and the default cache is not released.
    #[inline]
    pub(super) fn in_capture(&self, stream: StreamId) -> bool {
        if self.profile.diversion_is_capture {
            !self.diversions.is_empty()
        } else {
            self.captures > 0 && self.device.is_capturing(stream)
        }
    }
}
