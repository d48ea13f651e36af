//! Pointers that C programs pass in: null is refused, everything else is believed, as CUDA does.
#![allow(unsafe_code, reason = "reads and writes through pointers that a C program passed")]

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

use crate::code::{Code, Outcome};

/// Where a caller wants a `T`. Only C code makes one, as an argument of an entry point, and by CUDA's contract
/// it is null or points to room for a `T`; that is what makes the methods safe.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// A `T` that a caller shows us: null, or valid for the length of the call.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

/// A C string that a caller shows us: null, or valid for the length of the call.
#[repr(transparent)]
pub(crate) struct Text<'a>(*const c_char, PhantomData<&'a c_char>);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes, and fails on null.
    pub(crate) fn set(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and an `Out` comes only from a caller that owes room for a `T`. Alignment is not
        // taken for granted.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes if the caller wants to know.
    pub(crate) fn set_if_asked(self, value: T) {
        if !self.0.is_null() {
            let _ = self.set(value);
        }
    }

    /// The `index`-th of several; the caller's contract says how many there is room for.
    pub(crate) fn at(self, index: usize) -> Out<T> {
        if self.0.is_null() { self } else { Out(self.0.wrapping_add(index)) }
    }

    /// The same place as room for something else, where the type depends on another argument.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// What is there now: for arguments that go both ways.
    pub(crate) fn get(self) -> Result<T, Code>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

impl Out<c_char> {
    /// Writes a C string, cut to `room` bytes with its end.
    pub(crate) fn set_text(self, text: &str, room: usize) -> Outcome {
        let n_bytes = text.len().min(room.checked_sub(1).ok_or(Code::INVALID_VALUE)?);
        for (index, byte) in text.bytes().take(n_bytes).chain([0]).enumerate() {
            self.at(index).set(byte.cast_signed())?;
        }
        Ok(())
    }
}

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value at `address`, which a caller handed over as a number (an argument of a kernel, say).
    ///
    /// # Safety
    /// `address` is null or points to a valid `T`.
    pub(crate) unsafe fn from_address(address: u64) -> In<T> {
        In(address as *const T)
    }

    /// Reads, and fails on null.
    pub(crate) fn get(self) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and an `In` comes only from a caller that owes a valid `T`. Alignment is not taken
        // for granted.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The `index`-th of several; the caller's contract says how many there are.
    pub(crate) fn at(self, index: usize) -> In<T> {
        if self.0.is_null() { self } else { In(self.0.wrapping_add(index)) }
    }
}

impl Text<'_> {
    /// The text, or nothing for null.
    pub(crate) fn get(&self) -> Option<&CStr> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, and a `Text` comes only from a caller that owes a C string for the length of the
        // call, which outlives `self`.
        Some(unsafe { CStr::from_ptr(self.0) })
    }

    /// The address itself.
    pub(crate) fn address(&self) -> u64 {
        self.0 as u64
    }
}

/// A C string that stays valid for the life of the process, by its address: names of kernels, which lie in the
/// read-only data of the library that registered them.
///
/// # Safety
/// `address` is null or the address of a C string that is never freed.
pub(crate) unsafe fn static_text(address: u64) -> Option<&'static CStr> {
    let pointer = address as *const c_char;
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { CStr::from_ptr(pointer) })
}
