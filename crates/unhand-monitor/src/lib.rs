//! GPU memory as the driver sees it: devices and the processes on them, live or recorded. Makes no CUDA context.
//!
//! A [`Sampler`] gives a [`Sample`]: [`Nvml`] asks the driver's management library, [`Recorded`] gives samples that were
//! written down as JSON, for tests and for machines without a GPU. [`visible`] says which devices of a sample a process
//! sees and under which index.

mod error;
mod namespace;
mod nvml;
mod recorded;
mod sample;
mod visible;

pub use error::{Error, Result};
pub use namespace::PidNamespace;
pub use nvml::Nvml;
pub use recorded::Recorded;
pub use sample::{Device, Memory, Mig, MigDevice, Process, ProcessKind, Sample, Unreadable};
pub use visible::{Ended, Selection, Visible, VisibleDevice, visible};

/// Whatever can say how the devices are now.
pub trait Sampler {
    /// One look at all devices.
    ///
    /// # Errors
    /// Nobody answers for the devices. A single device that does not answer is in [`Sample::unreadable`] instead.
    fn sample(&mut self) -> Result<Sample>;
}
