//! What the stand-in asks of the operating system: address space, memory behind it, a way to look symbols up.
#![allow(unsafe_code, reason = "maps memory and copies between addresses that a C program passed")]

use std::ffi::{CStr, c_void};
use std::ptr;

/// The page size of x86-64; device memory is handled in multiples of 2 MiB.
pub(crate) const PAGE: u64 = 4096;

/// A range of address space of our own. Nothing in it is ever a Rust reference: it is memory that the program
/// under test sees through plain addresses.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// What was really mapped, to find an aligned part in.
    mapped: (u64, u64),
}

/// Memory that stands for a device's physical memory: mapped anywhere, also twice, it shows the same bytes.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    file: libc::c_int,
}

fn pointer(address: u64) -> *mut c_void {
    address as *mut c_void
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Arena {
    /// Takes address space without memory, aligned to `align`.
    pub(crate) fn reserve(bytes: u64, align: u64) -> Option<Arena> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let mapped =
            unsafe { libc::mmap(ptr::null_mut(), length(bytes + align), libc::PROT_NONE, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let base = (mapped as u64).next_multiple_of(align);
        // SAFETY: the range is inside the mapping made above. Failure is harmless: huge pages would only make
        // untouched memory cost more.
        unsafe { libc::madvise(pointer(base), length(bytes), libc::MADV_NOHUGEPAGE) };
        Some(Arena { base, bytes, mapped: (mapped as u64, bytes + align) })
    }

    pub(crate) fn contains(&self, address: u64, bytes: u64) -> bool {
        address >= self.base && bytes <= self.bytes && address - self.base <= self.bytes - bytes
    }

    /// Makes a range usable: private memory, zero where it was not touched since it was last dropped.
    pub(crate) fn commit(&self, address: u64, bytes: u64) -> bool {
        self.contains(address, bytes) && {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the range lies in this arena, where no Rust reference points.
            unsafe { libc::mprotect(pointer(address), length(bytes), access) == 0 }
        }
    }

    /// Drops what is in a range and takes access away. Later reads fault, as reads of freed memory should.
    pub(crate) fn discard(&self, address: u64, bytes: u64) -> bool {
        if !self.contains(address, bytes) {
            return false;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the range lies in this arena, where no Rust reference points; a fresh mapping takes its place.
        let mapped = unsafe { libc::mmap(pointer(address), length(bytes), libc::PROT_NONE, flags, -1, 0) };
        mapped != libc::MAP_FAILED
    }

    /// Puts a part of shared memory behind a range, without access.
    pub(crate) fn map(&self, address: u64, bytes: u64, memory: &SharedMemory, offset: u64) -> bool {
        let Ok(offset) = libc::off_t::try_from(offset) else { return false };
        if !self.contains(address, bytes) {
            return false;
        }
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the range lies in this arena, where no Rust reference points; the file is open while `memory` is.
        let mapped = unsafe {
            libc::mmap(pointer(address), length(bytes), libc::PROT_NONE, flags, memory.file, offset)
        };
        mapped != libc::MAP_FAILED
    }

    /// Sets or takes access to a mapped range.
    pub(crate) fn set_access(&self, address: u64, bytes: u64, is_usable: bool) -> bool {
        if is_usable {
            return self.commit(address, bytes);
        }
        // SAFETY: as in `commit`.
        self.contains(address, bytes)
            && unsafe { libc::mprotect(pointer(address), length(bytes), libc::PROT_NONE) == 0 }
    }

    /// Makes whole pages of committed private memory read as zero again, without touching them.
    pub(crate) fn zero_pages(&self, address: u64, bytes: u64) -> bool {
        self.contains(address, bytes) && {
            // SAFETY: the range lies in this arena, where no Rust reference points; dropping private anonymous
            // pages leaves zeros.
            unsafe { libc::madvise(pointer(address), length(bytes), libc::MADV_DONTNEED) == 0 }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let (start, bytes) = self.mapped;
        // SAFETY: the mapping is this arena's, and nobody can ask it for memory any more.
        unsafe { libc::munmap(pointer(start), length(bytes)) };
    }
}

impl SharedMemory {
    /// A sparse file in memory, of which only touched pages cost anything.
    pub(crate) fn new(bytes: u64) -> Option<SharedMemory> {
        // SAFETY: the name is a C string, and a new file concerns nobody else.
        let file = unsafe { libc::memfd_create(c"unhand-standin".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return None;
        }
        let memory = SharedMemory { file };
        // SAFETY: the file is ours and open.
        let done = unsafe { libc::ftruncate(memory.file, libc::off_t::try_from(bytes).ok()?) };
        (done == 0).then_some(memory)
    }

    /// Drops what is in a part of it: it reads as zero and costs nothing.
    pub(crate) fn discard(&self, offset: u64, bytes: u64) {
        let (Ok(offset), Ok(bytes)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else {
            return;
        };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the file is ours and open. Failure leaves old bytes, as a real device does.
        unsafe { libc::fallocate(self.file, mode, offset, bytes) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the file is ours, open, and not used after this.
        unsafe { libc::close(self.file) };
    }
}

/// Ordinary memory of its own mapping, as pinned memory is: page aligned, zero.
pub(crate) fn allocate_host(bytes: u64) -> Option<u64> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), length(bytes.max(1)), access, flags, -1, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped as u64)
}

/// Gives back what [`allocate_host`] returned.
///
/// # Safety
/// `address` and `bytes` are those of a mapping that nobody uses any more.
pub(crate) unsafe fn free_host(address: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(pointer(address), length(bytes.max(1))) };
}

/// Copies, also between overlapping ranges.
///
/// # Safety
/// `source` can be read and `target` written for `bytes`, and no Rust reference to either exists.
pub(crate) unsafe fn copy(target: u64, source: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(source as *const u8, target as *mut u8, length(bytes)) };
}

/// Fills a range with a pattern of 1, 2 or 4 bytes, given in the low bytes of `pattern`.
///
/// # Safety
/// `target` can be written for `count * width` bytes, and no Rust reference to it exists.
pub(crate) unsafe fn fill(target: u64, pattern: u32, width: u64, count: u64) {
    match width {
        1 => {
            // SAFETY: the caller's promise.
            unsafe { ptr::write_bytes(target as *mut u8, pattern.to_le_bytes()[0], length(count)) };
        }
        _ => {
            for index in 0..count {
                let bytes = pattern.to_le_bytes();
                let width = length(width.min(4));
                let to = (target + index * width as u64) as *mut u8;
                // SAFETY: the caller's promise; `index` stays below `count`.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, width) };
            }
        }
    }
}

/// Calls a function of one argument that the program registered.
///
/// # Safety
/// `function` is the address of an `extern "C"` function that takes `data`.
pub(crate) unsafe fn call(function: u64, data: u64) {
    if function == 0 {
        return;
    }
    // SAFETY: not null, and the caller's promise about its type.
    let function = unsafe { std::mem::transmute::<u64, extern "C" fn(u64)>(function) };
    function(data);
}

/// Calls a stream callback: stream, status, data.
///
/// # Safety
/// `function` is the address of a `cudaStreamCallback_t`.
pub(crate) unsafe fn call_back(function: u64, stream: u64, data: u64) {
    if function == 0 {
        return;
    }
    // SAFETY: not null, and the caller's promise about its type.
    let function = unsafe { std::mem::transmute::<u64, extern "C" fn(u64, libc::c_int, u64)>(function) };
    function(stream, 0, data);
}

/// The address of an exported symbol, ours first because we were loaded first; 0 if there is none.
pub(crate) fn symbol(name: &CStr) -> u64 {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    found as u64
}

/// This thread, in the numbers of the operating system.
pub(crate) fn thread() -> u64 {
    // SAFETY: always succeeds and has no preconditions.
    let thread = unsafe { libc::gettid() };
    u64::from(thread.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn read(address: u64) -> u8 {
        // SAFETY: the tests below read committed memory only.
        unsafe { ptr::read_volatile(address as *const u8) }
    }

    #[test]
    fn committed_memory_is_zero_again_after_a_discard() {
        let arena = Arena::reserve(1 << 40, 2 * MIB).expect("address space");
        assert!(arena.commit(arena.base, 4 * MIB));
        // SAFETY: committed above.
        unsafe { fill(arena.base, 7, 1, 4 * MIB) };
        assert_eq!(read(arena.base + MIB), 7);
        assert!(arena.discard(arena.base, 2 * MIB) && arena.commit(arena.base, 2 * MIB));
        assert_eq!((read(arena.base + MIB), read(arena.base + 3 * MIB)), (0, 7));
        assert!(!arena.commit(arena.base + arena.bytes, 1));
    }

    #[test]
    fn shared_memory_shows_the_same_bytes_wherever_it_is_mapped() {
        let arena = Arena::reserve(1 << 30, 2 * MIB).expect("address space");
        let memory = SharedMemory::new(1 << 40).expect("a file in memory");
        let (first, second) = (arena.base, arena.base + 8 * MIB);
        for address in [first, second] {
            assert!(
                arena.map(address, 2 * MIB, &memory, 4 * MIB) && arena.set_access(address, 2 * MIB, true)
            );
        }
        // SAFETY: mapped with access above.
        unsafe { fill(first, 0x0102_0304, 4, 2) };
        assert_eq!((read(second), read(second + 7)), (4, 1));
        memory.discard(4 * MIB, 2 * MIB);
        assert_eq!(read(first), 0);
    }
}
