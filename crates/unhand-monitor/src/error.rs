//! Why there is no sample: no library, no driver, no permission, no more recorded samples.

use nvml_wrapper::error::NvmlError;

/// What a sampler could not do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's management library is not installed, or not where the loader looks.
    #[error("the library of the NVIDIA driver cannot be loaded: `{library}`")]
    NoLibrary {
        /// The name it was looked for by.
        library: String,
        /// What the loader says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library lacks a function without which nothing works: it is not NVML, or older than any supported driver.
    #[error("the library of the NVIDIA driver lacks a function: `{function}`")]
    NoFunction {
        /// Its name in C.
        function: &'static str,
        /// What the loader says.
        source: NvmlError,
    },
    /// The library is there, the kernel module is not.
    #[error("the NVIDIA driver is not loaded")]
    NoDriver {
        /// What NVML says.
        source: NvmlError,
    },
    /// The library and the kernel module are of different versions: an update without a restart, or a container whose
    /// library is not the host's.
    #[error("the library and the kernel module of the NVIDIA driver are of different versions")]
    VersionMismatch {
        /// What NVML says.
        source: NvmlError,
    },
    /// The user, the container or its cgroup may not talk to the driver.
    #[error("no permission to talk to the NVIDIA driver")]
    NoPermission {
        /// What NVML says.
        source: NvmlError,
    },
    /// A call failed for another reason.
    #[error("the NVIDIA driver does not answer: `{function}`")]
    Call {
        /// The function in C.
        function: &'static str,
        /// What NVML says.
        source: NvmlError,
    },
    /// A recorded sample is not one.
    #[error("not a recorded sample: number {number}")]
    NotASample {
        /// Which of the recorded samples, from 1.
        number: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// All recorded samples have been given.
    #[error("the recording has ended: {n_samples} samples")]
    Ended {
        /// How many there were.
        n_samples: usize,
    },
}

/// What a sampler gives.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The error of a call, by what NVML says.
    pub(crate) fn of(function: &'static str, source: NvmlError) -> Error {
        match source {
            NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
                Error::NoFunction { function, source }
            }
            NvmlError::DriverNotLoaded => Error::NoDriver { source },
            NvmlError::LibRmVersionMismatch => Error::VersionMismatch { source },
            // `OperatingSystem` is what a cgroup that hides the device files looks like.
            NvmlError::NoPermission | NvmlError::OperatingSystem => Error::NoPermission { source },
            source => Error::Call { function, source },
        }
    }

    /// What to do about it; nothing if there is nothing that always helps.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::NoLibrary { .. } => Some(
                "install the NVIDIA driver; in a container, start it with access to the GPUs (`--gpus all`), which \
                 brings the library along",
            ),
            Error::NoDriver { .. } => Some(
                "load the kernel module (`modprobe nvidia`), or restart after an installation; in a container, give it \
                 the GPUs (`--gpus all`)",
            ),
            Error::VersionMismatch { .. } => {
                Some("restart the machine after a driver update; in a container, restart the container")
            }
            Error::NoPermission { .. } => {
                Some("look at who may read and write `/dev/nvidiactl`; a container needs `--gpus all`")
            }
            Error::NoFunction { .. } => Some("update the NVIDIA driver"),
            Error::Call { .. } | Error::NotASample { .. } | Error::Ended { .. } => None,
        }
    }
}
