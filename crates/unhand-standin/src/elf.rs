//! Shared libraries as files: reads what one needs and exports, and writes small ones. Knows 64-bit x86 Linux only.

mod read;
mod write;

pub(crate) use read::{Needs, read, read_from};
pub(crate) use write::{Function, Library, Patch};
