//! Reads and writes PyTorch CUDA memory snapshots; nothing in a pickle is ever executed, and no file is opened here.

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
mod release;
mod settle;
mod stacks;
mod strings;
mod trace;
mod truncated;
mod value;
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
