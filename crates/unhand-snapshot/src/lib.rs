//! Reads and writes PyTorch CUDA memory snapshots; nothing in a pickle is ever executed, and no file is opened here.
//!
//! `torch.cuda.memory._dump_snapshot("run.pickle")` writes what PyTorch's allocator did and holds. This crate turns
//! such bytes into a [`Snapshot`]: segments and blocks, the history of each device as columns ([`Trace`]), call stacks
//! as a trie ([`Stacks`]), and back into bytes that PyTorch's own tools open. A million events with stacks of 65
//! frames, 295 MB of pickle, take about a second and 110 MB.
//!
//! ```
//! use unhand_snapshot::{Action, ReadOptions, Snapshot, decompress};
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/snapshots/leak.stacks.pickle.xz");
//! # let file = std::fs::read(path).expect("a recording");
//! // let file = std::fs::read("run.pickle.xz")?;
//! let bytes = decompress(&file)?; // gzip, xz, zstd, or as it is
//! let snapshot = Snapshot::read(&bytes, &ReadOptions::default())?;
//!
//! // The largest request, and the line of code that made it.
//! let allocs = snapshot.traces[0].iter().filter(|event| event.action == Action::Alloc);
//! let largest = allocs.max_by_key(|event| event.size).expect("an allocation");
//! println!("{} bytes", largest.size);
//! if let Some(frame) = snapshot.stacks.innermost(largest.stack) {
//!     let frame = snapshot.stacks.frame(frame);
//!     println!("at {}:{}", snapshot.strings.get(frame.filename), frame.line);
//! }
//! # assert!(largest.size > 1 << 20);
//! # Ok::<(), unhand_snapshot::Error>(())
//! ```
//!
//! # What it promises
//!
//! - An opcode that would import or call something is an [`Error`] with its byte offset.
//! - Memory is bounded by a multiple of the input, depth by a constant; a cycle is an error.
//! - Keys this crate does not know are kept and written back.
//! - Files of torch 1.13 to 2.15, of Python's and of `TorchScript`'s pickler, protocols 2 to 5.

#![forbid(unsafe_code)]

mod convert;
mod decompress;
mod error;
mod hash;
mod item;
mod keys;
mod machine;
mod model;
mod opcode;
mod pickler;
mod read;
mod refuse;
mod release;
mod settle;
mod stacks;
mod strings;
mod trace;
mod truncated;
mod value;
mod values;
mod write;

pub use decompress::{decompress, decompress_limited, decompress_partial};
pub use error::Error;
pub use model::*;
pub use read::ReadOptions;
pub use release::ReleaseRange;
pub use stacks::{Frame, Stacks};
pub use strings::Strings;
pub use trace::Trace;
pub use value::{Extra, Value};
