//! A GPU that is not there: the CUDA runtime and driver on host memory, under the unmodified PyTorch.
//!
//! PyTorch's CUDA wheels ask for memory, streams, events and kernels through CUDA's runtime and driver. This crate
//! takes their place: memory is host memory behind a capacity, copies move bytes, capture has CUDA's rules, and kernels
//! compute nothing but a few values that programs branch on. PyTorch's own allocator cannot tell the difference, so
//! that what it does on a machine without a GPU is what it would do on a device. `docs/concepts/stand-in.md` says what
//! is true, what is computed, and every limit known.
//!
//! The crate is two things. As the cdylib `libunhand_standin.so` it is what a program loads; that half exports CUDA's
//! C functions and has no Rust interface. As a library it sets a program up:
//!
//! ```no_run
//! let torch = unhand_standin::inspect(&unhand_standin::find("python3")?)?;
//! let plan = unhand_standin::plan(&torch, &unhand_standin::core_library()?)?;
//! let prepared = unhand_standin::prepare(&plan, "/tmp/standin".as_ref())?;
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
