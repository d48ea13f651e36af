//! A GPU that is not there: the CUDA runtime and driver on host memory, under the unmodified PyTorch.

// The two halves of this crate: what a preloaded library is (`gpu`, `entry`), and what sets a program up to load it.
mod code;
pub mod config;
mod elf;
mod entry;
mod error;
mod gpu;
mod launcher;
mod pointers;
mod profile;
mod stub;
mod sys;
mod table;
mod torch;

pub use error::Error;
pub use launcher::{Plan, Prepared, core_library, plan, prepare};
pub use profile::{PROFILES, Profile};
pub use torch::{Torch, find, inspect};
