//! One look at the devices as data; field names are the JSON names. What the driver does not say is `None`, never 0.

use serde::{Deserialize, Serialize};

/// How the devices are at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The driver's version, for example `580.95.05`.
    pub driver_version: Option<String>,
    /// The newest CUDA that the driver runs, for example `13.0`.
    pub cuda_driver_version: Option<String>,
    /// All devices that the driver shows, by index.
    pub devices: Vec<Device>,
    /// Devices that are there and do not answer.
    #[serde(default)]
    pub unreadable: Vec<Unreadable>,
    /// Whether the process ids are those of another namespace: the host's, seen from inside a container. `None` if that
    /// cannot be told.
    #[serde(default)]
    pub has_foreign_pids: Option<bool>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The driver's index, in the order of the PCI bus. Not CUDA's: see [`visible`](crate::visible).
    pub index: u32,
    /// `GPU-` and the identifier.
    pub uuid: String,
    /// The model.
    pub name: Option<String>,
    /// Its memory; absent on devices that share the host's.
    #[serde(flatten)]
    pub memory: Memory,
    /// Its parts, on devices that can be divided; `None` on others.
    #[serde(default)]
    pub mig: Option<Mig>,
    /// Who uses it; `None` if the driver does not tell.
    #[serde(default)]
    pub processes: Option<Vec<Process>>,
}

/// Memory of a device or of a part of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Everything that is installed. CUDA's own total is this without [`reserved_bytes`](Memory::reserved_bytes).
    pub total_bytes: Option<u64>,
    /// What processes hold. Without the driver's own part where [`reserved_bytes`](Memory::reserved_bytes) is known,
    /// with it otherwise.
    pub used_bytes: Option<u64>,
    /// What nobody holds.
    pub free_bytes: Option<u64>,
    /// What the driver keeps for itself; `None` where it counts that as used.
    pub reserved_bytes: Option<u64>,
}

/// How a device is divided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    /// Whether it is divided now.
    pub is_enabled: bool,
    /// The parts that exist.
    pub devices: Vec<MigDevice>,
}

/// A part of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// The index among the parts of its device.
    pub index: u32,
    /// `MIG-` and the identifier.
    pub uuid: String,
    /// The profile, as part of the name.
    pub name: Option<String>,
    /// Its memory.
    #[serde(flatten)]
    pub memory: Memory,
    /// Who uses it; `None` if the driver does not tell.
    #[serde(default)]
    pub processes: Option<Vec<Process>>,
}

/// A process on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number, in the driver's namespace: see [`Sample::has_foreign_pids`].
    pub pid: u32,
    /// What it holds; `None` where the driver does not count by process (WDDM, some containers).
    pub used_bytes: Option<u64>,
    /// What it uses the device for.
    pub kind: ProcessKind,
}

/// What a process uses a device for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// CUDA.
    Compute,
    /// A screen, or a renderer.
    Graphics,
    /// Both.
    ComputeAndGraphics,
}

/// A device that does not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// The driver's index.
    pub index: u32,
    /// What the driver says.
    pub reason: String,
}
