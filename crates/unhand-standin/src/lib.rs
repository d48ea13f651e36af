//! A GPU that is not there: the CUDA runtime and driver on host memory, under the unmodified PyTorch.
//!
//! PyTorch's CUDA wheels ask for memory, streams, events and kernels through CUDA's runtime and driver. This crate
//! takes their place: memory is host memory behind a capacity, copies move bytes, capture has CUDA's rules, and kernels
//! compute nothing but a few values that programs branch on. PyTorch's own allocator cannot tell the difference, so
//! that what it does on a machine without a GPU is what it would do on a device. `docs/concepts/stand-in.md` says what
//! is true, what is computed, and every limit known.
//!
//! The crate is two things. One is what a program loads; it exports CUDA's C functions and has no Rust interface. The
//! other is this library, which carries the first inside and sets a program up:
//!
//! ```no_run
//! let torch = unhand_standin::inspect(&unhand_standin::find("python3")?)?;
//! let prepared = unhand_standin::prepare(&unhand_standin::plan(&torch)?, "/tmp/standin".as_ref())?;
//! std::process::Command::new("python3")
//!     .arg("train.py")
//!     .envs(prepared.environment)
//!     .env(unhand_standin::config::GPU, "l4")
//!     .status()
//!     .expect("python3 runs");
//! # Ok::<(), unhand_standin::Error>(())
//! ```
//!
//! [`inspect`] reads which libraries and functions a wheel needs, [`plan`] compares that with what there is, and
//! [`prepare`] writes one small library for each of NVIDIA's names. [`config`] has the variables that choose the GPU.

pub mod config;
mod profile;

pub use profile::{PROFILES, Profile};

// What a program loads. Only `build.rs` compiles it into a library: no other may export CUDA's names.
#[cfg(any(test, unhand_standin_loaded))]
mod code;
#[cfg(any(test, unhand_standin_loaded))]
mod entry;
#[cfg(any(test, unhand_standin_loaded))]
mod gpu;
#[cfg(any(test, unhand_standin_loaded))]
mod pointers;
#[cfg(any(test, unhand_standin_loaded))]
mod sys;

// What sets a program up to load it.
#[cfg(not(unhand_standin_loaded))]
mod elf;
#[cfg(not(unhand_standin_loaded))]
mod error;
#[cfg(not(unhand_standin_loaded))]
mod launcher;
#[cfg(not(unhand_standin_loaded))]
mod stub;
#[cfg(not(unhand_standin_loaded))]
mod table;
#[cfg(not(unhand_standin_loaded))]
mod torch;

#[cfg(not(unhand_standin_loaded))]
pub use error::Error;
#[cfg(not(unhand_standin_loaded))]
pub use launcher::{Plan, Prepared, plan, prepare};
#[cfg(not(unhand_standin_loaded))]
pub use torch::{Torch, find, inspect};
