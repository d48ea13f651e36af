//! Reads and writes PyTorch CUDA memory snapshots; nothing in a pickle is ever executed.
//!
//! (The public model is in [`model`]; see there.)
pub mod model;
pub use model::*;
