//! Why a program cannot be run on the stand-in.

use std::path::PathBuf;

/// What can go wrong before the program starts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no `torch/lib` where it was looked for.
    #[error("no PyTorch here: `{0}`")]
    NoTorch(PathBuf),
    /// The interpreter has no PyTorch, or did not run.
    #[error("cannot find PyTorch through `{python}`: {message}")]
    Python {
        /// The interpreter.
        python: String,
        /// What it said.
        message: String,
    },
    /// A PyTorch without CUDA, or for another kind of GPU.
    #[error("this PyTorch is not built for CUDA: `{0}`")]
    NotCuda(String),
    /// The stand-in needs another machine.
    #[error("the stand-in runs on 64-bit x86 Linux with glibc only")]
    Platform,
    /// A path with a character at which the loader would cut it.
    #[error("the loader cannot take a path with a colon or a space: `{0}`")]
    Path(PathBuf),
    /// PyTorch needs functions that nobody provides.
    #[error("PyTorch needs {} functions that the stand-in does not have, the first is `{}`", .0.len(), .0.first().map_or("", String::as_str))]
    Missing(Vec<String>),
    /// A file cannot be read or written.
    #[error("`{path}`: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}
