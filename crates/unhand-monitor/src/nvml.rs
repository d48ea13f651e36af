//! The sampler that asks the driver, through its management library NVML. The only file that knows the crate behind it.

mod memory;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::namespace::PidNamespace;
use crate::{Device, Error, Mig, MigDevice, Process, ProcessKind, Result, Sample, Sampler, Unreadable};

/// `NVML_DEVICE_MIG_ENABLE`
const MIG_IS_ENABLED: u32 = 1;
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Where WSL keeps it; not every distribution tells the loader.
const LIBRARY_OF_WSL: &str = "/usr/lib/wsl/lib/libnvidia-ml.so.1";

/// The driver's management library, loaded and initialized. Dropping it gives both back.
#[derive(Debug)]
pub struct Nvml {
    library: nvml_wrapper::Nvml,
}

impl Nvml {
    /// Loads the library where the system keeps it.
    ///
    /// # Errors
    /// There is none, or it finds no driver.
    pub fn load() -> Result<Nvml> {
        match Nvml::load_from(OsStr::new(LIBRARY)) {
            Err(Error::NoLibrary { .. }) if Path::new(LIBRARY_OF_WSL).exists() => {
                Nvml::load_from(OsStr::new(LIBRARY_OF_WSL))
            }
            result => result,
        }
    }

    /// Loads this library.
    ///
    /// # Errors
    /// It is not there, is not NVML, or finds no driver.
    pub fn load_from(path: &OsStr) -> Result<Nvml> {
        match nvml_wrapper::Nvml::builder().lib_path(path).init() {
            Ok(library) => Ok(Nvml { library }),
            Err(NvmlError::LibloadingError(source)) => {
                let library = path.to_string_lossy().into_owned();
                Err(Error::NoLibrary { library, source: Box::new(source) })
            }
            Err(source) => Err(Error::of("nvmlInit_v2", source)),
        }
    }
}

impl Sampler for Nvml {
    fn sample(&mut self) -> Result<Sample> {
        let n_devices =
            self.library.device_count().map_err(|error| Error::of("nvmlDeviceGetCount_v2", error))?;
        let mut sample = Sample {
            driver_version: self.library.sys_driver_version().ok(),
            cuda_driver_version: self.library.sys_cuda_driver_version().ok().map(cuda_version),
            ..Sample::default()
        };
        for index in 0..n_devices {
            match self.device(index) {
                Ok(device) => sample.devices.push(device),
                Err(error) => sample.unreadable.push(Unreadable { index, reason: error.to_string() }),
            }
        }
        let pids: Vec<u32> = sample.devices.iter().flat_map(pids_of).collect();
        sample.has_foreign_pids = PidNamespace::read().is_foreign(pids.into_iter());
        Ok(sample)
    }
}

impl Nvml {
    fn device(&self, index: u32) -> std::result::Result<Device, NvmlError> {
        let device = self.library.device_by_index(index)?;
        Ok(Device {
            index,
            uuid: device.uuid()?,
            name: device.name().ok(),
            memory: memory::of(&self.library, &device),
            mig: mig_of(&self.library, &device),
            processes: processes_of(&device),
        })
    }
}

fn pids_of(device: &Device) -> impl Iterator<Item = u32> + '_ {
    let parts = device.mig.iter().flat_map(|mig| &mig.devices);
    let lists = parts.map(|part| &part.processes).chain([&device.processes]);
    lists.flatten().flatten().map(|process| process.pid)
}

/// 13000 is `13.0`.
fn cuda_version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// The parts of a device; `None` if it cannot be divided, or the driver is older than the idea.
fn mig_of(library: &nvml_wrapper::Nvml, device: &nvml_wrapper::Device<'_>) -> Option<Mig> {
    let is_enabled = device.mig_mode().ok()?.current == MIG_IS_ENABLED;
    if !is_enabled {
        return Some(Mig::default());
    }
    // The count is how many there can be; an index without a part is not found.
    let n_slots = device.mig_device_count().unwrap_or(0);
    let parts = (0..n_slots).filter_map(|index| {
        let part = device.mig_device_by_index(index).ok()?;
        Some(MigDevice {
            index,
            uuid: part.uuid().ok()?,
            name: part.name().ok(),
            memory: memory::of(library, &part),
            processes: processes_of(&part),
        })
    });
    Some(Mig { is_enabled, devices: parts.collect() })
}

/// Who computes and who draws, as one list; `None` if the driver tells neither.
fn processes_of(device: &nvml_wrapper::Device<'_>) -> Option<Vec<Process>> {
    // The first form is of driver 510, the second of the ones before.
    let compute = device.running_compute_processes().or_else(|error| match error {
        NvmlError::FailedToLoadSymbol(_) => device.running_compute_processes_v2(),
        error => Err(error),
    });
    let graphics = device.running_graphics_processes().or_else(|error| match error {
        NvmlError::FailedToLoadSymbol(_) => device.running_graphics_processes_v2(),
        error => Err(error),
    });
    if compute.is_err() && graphics.is_err() {
        return None;
    }
    Some(merge(&compute.unwrap_or_default(), &graphics.unwrap_or_default()))
}

/// One entry for each process, by its number.
fn merge(compute: &[ProcessInfo], graphics: &[ProcessInfo]) -> Vec<Process> {
    let mut by_pid = BTreeMap::<u32, Process>::new();
    let compute = compute.iter().map(|process| (process, ProcessKind::Compute));
    let graphics = graphics.iter().map(|process| (process, ProcessKind::Graphics));
    for (process, kind) in compute.chain(graphics) {
        let used_bytes = used_bytes(&process.used_gpu_memory);
        by_pid
            .entry(process.pid)
            .and_modify(|known| {
                // Both lists give the sum of the process, and the same process can be in one list once for each part.
                if known.kind == kind {
                    known.used_bytes = known.used_bytes.zip(used_bytes).map(|(one, other)| one + other);
                } else {
                    known.kind = ProcessKind::ComputeAndGraphics;
                    known.used_bytes = known.used_bytes.or(used_bytes);
                }
            })
            .or_insert(Process { pid: process.pid, used_bytes, kind });
    }
    by_pid.into_values().collect()
}

fn used_bytes(used: &UsedGpuMemory) -> Option<u64> {
    match used {
        UsedGpuMemory::Used(bytes) => Some(*bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(pid: u32, used_gpu_memory: UsedGpuMemory) -> ProcessInfo {
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    #[test]
    fn a_process_is_listed_once_and_unknown_is_not_zero() {
        use UsedGpuMemory::{Unavailable, Used};
        let compute = [info(9, Used(100)), info(4, Unavailable), info(5, Used(1)), info(5, Used(2))];
        let graphics = [info(9, Used(100)), info(3, Used(7))];
        let process = |pid, used_bytes, kind| Process { pid, used_bytes, kind };
        assert_eq!(
            merge(&compute, &graphics),
            [
                process(3, Some(7), ProcessKind::Graphics),
                process(4, None, ProcessKind::Compute),
                process(5, Some(3), ProcessKind::Compute),
                process(9, Some(100), ProcessKind::ComputeAndGraphics),
            ]
        );
        // What NVML writes for "not available".
        assert_eq!(used_bytes(&UsedGpuMemory::from(u64::MAX)), None);
    }

    #[test]
    fn versions_of_cuda_are_written_as_people_do() {
        assert_eq!((cuda_version(13_000), cuda_version(12_080)), ("13.0".to_owned(), "12.8".to_owned()));
    }

    #[test]
    fn says_which_library_is_missing_and_which_function() {
        let error = Nvml::load_from(OsStr::new("libnvidia-of-nobody.so.1")).expect_err("nobody has it");
        assert_eq!(
            error.to_string(),
            "the library of the NVIDIA driver cannot be loaded: `libnvidia-of-nobody.so.1`"
        );
        let source = std::error::Error::source(&error).expect("the loader's words").to_string();
        assert!(source.contains("libnvidia-of-nobody.so.1: cannot open shared object file"), "{source}");

        let error = Nvml::load_from(OsStr::new("libm.so.6")).expect_err("mathematics");
        assert_eq!(error.to_string(), "the library of the NVIDIA driver lacks a function: `nvmlInit_v2`");
    }

    #[test]
    fn every_state_of_the_driver_has_an_error_of_its_own() {
        let error = |source| Error::of("nvmlInit_v2", source);
        assert!(matches!(error(NvmlError::DriverNotLoaded), Error::NoDriver { .. }));
        assert!(matches!(error(NvmlError::LibRmVersionMismatch), Error::VersionMismatch { .. }));
        assert!(matches!(error(NvmlError::NoPermission), Error::NoPermission { .. }));
        assert!(matches!(error(NvmlError::OperatingSystem), Error::NoPermission { .. }));
        assert!(matches!(error(NvmlError::Unknown), Error::Call { .. }));
    }
}
