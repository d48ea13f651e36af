//! The GPU that is not there: all state of the process, behind one lock. Knows nothing of C's calling convention.

pub(crate) mod capture;
pub(crate) mod copy;
pub(crate) mod emulate;
pub(crate) mod graph;
pub(crate) mod host;
pub(crate) mod kernels;
pub(crate) mod launch;
pub(crate) mod log;
pub(crate) mod memory;
pub(crate) mod physical;
pub(crate) mod properties;
pub(crate) mod stream;

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::code::{Code, Outcome};
use crate::config::Config;
use capture::Captures;
use graph::Graphs;
use host::HostMemory;
use kernels::Kernels;
use memory::DeviceMemory;
use physical::Physical;
use stream::Streams;

thread_local! {
    static CURRENT_DEVICE: Cell<usize> = const { Cell::new(0) };
}

/// Everything there is.
pub(crate) struct Gpu {
    pub(crate) devices: Vec<DeviceMemory>,
    pub(crate) physical: Physical,
    pub(crate) host: HostMemory,
    pub(crate) streams: Streams,
    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    pub(crate) kernels: Kernels,
}

/// What the environment asked for, read at the first use and not at load: children that inherit the preload and
/// never touch CUDA must not notice it.
pub(crate) fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config::from(|name| std::env::var(name).ok()))
}

/// The GPU, locked. No callback into the program may run while the guard lives.
pub(crate) fn gpu() -> MutexGuard<'static, Gpu> {
    static GPU: OnceLock<Mutex<Gpu>> = OnceLock::new();
    // Each entry point leaves the state whole before it can panic, so a poisoned lock is still good.
    GPU.get_or_init(|| Mutex::new(Gpu::new(config()))).lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    fn new(config: &Config) -> Gpu {
        let devices: Vec<DeviceMemory> = (0..config.n_devices)
            .map_while(|_| DeviceMemory::new(config.n_devices, config.memory_bytes, config.context_bytes))
            .map(|device| device.giving_out(config.capacity_bytes))
            .collect();
        Gpu {
            devices,
            physical: Physical::default(),
            host: HostMemory::default(),
            streams: Streams::new(config.lag_us),
            captures: Captures::default(),
            graphs: Graphs::default(),
            kernels: Kernels::default(),
        }
    }

    /// The device of a number from a caller.
    pub(crate) fn device(&mut self, ordinal: i32) -> Result<&mut DeviceMemory, Code> {
        let index = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        self.devices.get_mut(index).ok_or(Code::INVALID_DEVICE)
    }

    /// The calling thread's device. To use it is to have a context on it.
    pub(crate) fn current(&mut self) -> Result<&mut DeviceMemory, Code> {
        let device = self.device(current_device())?;
        device.enter();
        Ok(device)
    }

    /// Which device an address belongs to, whether or not memory is there.
    pub(crate) fn device_of(&self, address: u64) -> Option<usize> {
        self.devices.iter().position(|device| device.arena.contains(address, 0))
    }
}

/// The calling thread's device.
pub(crate) fn current_device() -> i32 {
    i32::try_from(CURRENT_DEVICE.get()).unwrap_or(0)
}

/// Chooses it. Since CUDA 12 that makes a context there.
pub(crate) fn set_current_device(ordinal: i32) -> Outcome {
    let index = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    let mut gpu = gpu();
    let device = gpu.devices.get_mut(index).ok_or(Code::INVALID_DEVICE)?;
    if config().cuda_major() >= 12 {
        device.enter();
    }
    CURRENT_DEVICE.set(index);
    Ok(())
}
