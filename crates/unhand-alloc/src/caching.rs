//! The thread-safe front: one caching allocator per device, one lock per device.

use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::allocator::{Allocation, DeviceAllocator, Request, SegmentInfo};
use crate::device::{Device, MemInfo, StreamId};
use crate::error::AllocError;
use crate::profile::Profile;
use crate::settings::Settings;
use crate::stats::DeviceStats;
use crate::summary::summary;

/// Caching allocators for all devices of a process (`NativeCachingAllocator`). Every call locks its device only.
///
/// ```
/// use unhand_alloc::{CachingAllocator, NullDevice, Request};
/// let allocator = CachingAllocator::new(vec![NullDevice::new(1 << 30)]);
/// let tensor = allocator.malloc(0, Request::new(5 << 20))?;
/// assert_eq!(allocator.memory_allocated(0)?, 5 << 20);
/// assert_eq!(allocator.memory_reserved(0)?, 20 << 20);
/// allocator.free(0, tensor)?;
/// assert_eq!(allocator.memory_reserved(0)?, 20 << 20);
/// allocator.empty_cache()?;
/// assert_eq!(allocator.memory_reserved(0)?, 0);
/// # Ok::<(), unhand_alloc::AllocError>(())
/// ```
#[derive(Debug)]
pub struct CachingAllocator<D> {
    devices: Vec<Mutex<DeviceAllocator<D>>>,
}

impl<D: Device> CachingAllocator<D> {
    /// Allocators with default settings, behaving as the newest release. A device's index is its place in the
    /// list.
    pub fn new(devices: Vec<D>) -> CachingAllocator<D> {
        CachingAllocator::with_settings(devices, &Settings::default(), Profile::default())
    }

    /// Allocators with given settings, behaving as a given release.
    pub fn with_settings(devices: Vec<D>, settings: &Settings, profile: Profile) -> CachingAllocator<D> {
        let make = |device| Mutex::new(DeviceAllocator::with_settings(device, settings.clone(), profile));
        CachingAllocator { devices: devices.into_iter().map(make).collect() }
    }

    /// Locks one device's allocator, for the calls this front does not repeat.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    #[inline]
    pub fn device(&self, device: usize) -> Result<MutexGuard<'_, DeviceAllocator<D>>, AllocError> {
        let device = self.devices.get(device).ok_or(AllocError::NoSuchDevice(device))?;
        // An allocator cannot refuse service because some thread died; `validate` tells whether it may go on.
        Ok(device.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Number of devices.
    pub fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// [`DeviceAllocator::malloc`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn malloc(&self, device: usize, request: Request) -> Result<Allocation, AllocError> {
        self.device(device)?.malloc(request)
    }

    /// [`DeviceAllocator::free`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn free(&self, device: usize, allocation: Allocation) -> Result<(), AllocError> {
        self.device(device)?.free(allocation)
    }

    /// [`DeviceAllocator::free_address`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn free_address(&self, device: usize, address: u64) -> Result<(), AllocError> {
        self.device(device)?.free_address(address)
    }

    /// [`DeviceAllocator::record_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn record_stream(
        &self,
        device: usize,
        allocation: Allocation,
        stream: StreamId,
    ) -> Result<(), AllocError> {
        self.device(device)?.record_stream(allocation, stream)
    }

    /// Gives every wholly free segment and page of every device back (`torch.cuda.empty_cache()`).
    ///
    /// # Errors
    /// [`AllocError::Device`].
    pub fn empty_cache(&self) -> Result<(), AllocError> {
        (0..self.devices.len()).try_for_each(|device| self.device(device)?.empty_cache())
    }

    /// Bytes of blocks handed out.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`], here and below.
    pub fn memory_allocated(&self, device: usize) -> Result<u64, AllocError> {
        Ok(self.device(device)?.memory_allocated())
    }

    /// Bytes held from the device.
    #[expect(clippy::missing_errors_doc, reason = "as `memory_allocated`")]
    pub fn memory_reserved(&self, device: usize) -> Result<u64, AllocError> {
        Ok(self.device(device)?.memory_reserved())
    }

    /// The most bytes handed out since the peaks were last reset.
    pub fn max_memory_allocated(&self, device: usize) -> Result<u64, AllocError> {
        Ok(self.device(device)?.memory_stats().allocated_bytes().peak.cast_unsigned())
    }

    /// The most bytes held from the device since the peaks were last reset.
    pub fn max_memory_reserved(&self, device: usize) -> Result<u64, AllocError> {
        Ok(self.device(device)?.memory_stats().reserved_bytes().peak.cast_unsigned())
    }

    /// All statistics.
    pub fn memory_stats(&self, device: usize) -> Result<DeviceStats, AllocError> {
        Ok(self.device(device)?.memory_stats())
    }

    /// A table of the statistics, in the form of `torch.cuda.memory_summary()`.
    pub fn memory_summary(&self, device: usize, abbreviated: bool) -> Result<String, AllocError> {
        let stats = self.memory_stats(device)?;
        Ok(summary(device, &stats, abbreviated))
    }

    /// All segments of one device, lowest address first.
    pub fn memory_snapshot(&self, device: usize) -> Result<Vec<SegmentInfo>, AllocError> {
        Ok(self.device(device)?.memory_snapshot())
    }

    /// Peaks start anew from what is there now.
    pub fn reset_peak_memory_stats(&self, device: usize) -> Result<(), AllocError> {
        self.device(device)?.reset_peak_memory_stats();
        Ok(())
    }

    /// Totals in and out start anew.
    pub fn reset_accumulated_memory_stats(&self, device: usize) -> Result<(), AllocError> {
        self.device(device)?.reset_accumulated_memory_stats();
        Ok(())
    }

    /// Free and total bytes of the device.
    pub fn mem_get_info(&self, device: usize) -> Result<MemInfo, AllocError> {
        Ok(self.device(device)?.mem_get_info())
    }

    /// The segments that live blocks keep from going back, the most free bytes first, as lines of text: which
    /// blocks pin how much.
    pub fn pinned_report(&self, device: usize) -> Result<String, AllocError> {
        let mut segments = self.memory_snapshot(device)?;
        segments.retain(|segment| segment.is_pinned() && segment.inactive_size() > 0);
        segments.sort_by_key(|segment| std::cmp::Reverse(segment.inactive_size()));
        let mut text = String::new();
        for segment in &segments {
            let (total, stuck) = (crate::Bytes(segment.total_size), crate::Bytes(segment.inactive_size()));
            let _ = writeln!(text, "segment {:#x}, {total}: {stuck} stuck, pinned by", segment.address);
            for block in segment.blocks.iter().filter(|block| block.state != crate::BlockState::Inactive) {
                let _ = writeln!(text, "  block {:#x}, {}", block.address, crate::Bytes(block.size));
            }
        }
        Ok(text)
    }
}
