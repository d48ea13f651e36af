//! The knobs of the stand-in: environment variables, read once by the preloaded library and set by the launcher.

use crate::profile::{H200, Profile};

/// Which GPU to stand in for: a name of [`PROFILES`](crate::PROFILES).
pub const GPU: &str = "UNHAND_STANDIN_GPU";
/// How many devices there are.
pub const DEVICES: &str = "UNHAND_STANDIN_DEVICES";
/// Bytes of memory of each device, instead of the profile's; `KiB`, `MiB` and `GiB` may follow the number.
pub const MEMORY: &str = "UNHAND_STANDIN_MEMORY";
/// Bytes that each device gives out before it refuses, while it states what it always states. To find out what a program
/// needs, where a refusal would end it.
pub const CAPACITY: &str = "UNHAND_STANDIN_CAPACITY";
/// Bytes that the context takes from each device, instead of the profile's.
pub const CONTEXT: &str = "UNHAND_STANDIN_CONTEXT";
/// Microseconds until submitted work counts as done, unless somebody waits for it.
pub const LAG_US: &str = "UNHAND_STANDIN_LAG_US";
/// `0`: copies and fills on the device move no bytes, and take no host memory.
pub const COPIES: &str = "UNHAND_STANDIN_COPIES";
/// Bytes of workspace that every cuDNN plan asks for.
pub const CUDNN_WORKSPACE: &str = "UNHAND_STANDIN_CUDNN_WORKSPACE";
/// The CUDA version of the wheel, as `13000` for 13.0. Decides the layout of structs.
pub const CUDA: &str = "UNHAND_STANDIN_CUDA";
/// The cuDNN version the wheel was built with, as `91900` for 9.19.0.
pub const CUDNN: &str = "UNHAND_STANDIN_CUDNN";
/// The NCCL version the wheel was built with, as `22809` for 2.28.9.
pub const NCCL: &str = "UNHAND_STANDIN_NCCL";
/// Tensors up to this many bytes get the values that known kernels would give them; 0 turns that off.
pub const VALUES: &str = "UNHAND_STANDIN_VALUES";
/// A file to which calls without an effect, and kernels whose values are not computed, are written at exit.
pub const LOG: &str = "UNHAND_STANDIN_LOG";

/// At most this many devices fit into the address space of a process.
pub const MAX_DEVICES: usize = 16;

/// What the environment asks for. What is not set, or cannot be read, is as for one H200 under CUDA 13.0.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The GPU that is stood in for.
    pub profile: &'static Profile,
    /// How many there are.
    pub n_devices: usize,
    /// Memory of each, as `cudaMemGetInfo` states it.
    pub memory_bytes: u64,
    /// How much of it is given out.
    pub capacity_bytes: u64,
    /// What the context takes of it.
    pub context_bytes: u64,
    /// How long submitted work takes.
    pub lag_us: u64,
    /// Whether copies move bytes.
    pub does_copy: bool,
    /// Workspace of every cuDNN plan.
    pub cudnn_workspace_bytes: u64,
    /// 1000 × major + 10 × minor.
    pub cuda_version: i32,
    /// 10000 × major + 100 × minor + patch.
    pub cudnn_version: i32,
    /// 10000 × major + 100 × minor + patch.
    pub nccl_version: i32,
    /// Up to which size values are computed where the kernel is known.
    pub values_bytes: u64,
    /// Where to write what had no effect.
    pub log: Option<String>,
}

impl Config {
    /// Reads the variables through `get`, so that a test needs no environment.
    pub fn from(get: impl Fn(&str) -> Option<String>) -> Config {
        let number = |name: &str| get(name).and_then(|text| parse_bytes(&text));
        let version = |name: &str, otherwise: i32| {
            number(name).and_then(|value| i32::try_from(value).ok()).unwrap_or(otherwise)
        };
        let profile = get(GPU).and_then(|name| Profile::named(&name)).unwrap_or(&H200);
        let n_devices = number(DEVICES).and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
        let memory_bytes = number(MEMORY).unwrap_or(profile.memory_bytes);
        Config {
            profile,
            n_devices: n_devices.min(MAX_DEVICES),
            memory_bytes,
            capacity_bytes: number(CAPACITY).unwrap_or(memory_bytes),
            context_bytes: number(CONTEXT).unwrap_or(profile.context_bytes),
            lag_us: number(LAG_US).unwrap_or(0),
            does_copy: get(COPIES).as_deref() != Some("0"),
            cudnn_workspace_bytes: number(CUDNN_WORKSPACE).unwrap_or(0),
            cuda_version: version(CUDA, 13_000),
            cudnn_version: version(CUDNN, 91_900),
            nccl_version: version(NCCL, 22_809),
            values_bytes: number(VALUES).unwrap_or(1 << 20),
            log: get(LOG).filter(|path| !path.is_empty()),
        }
    }

    /// 12 or 13.
    pub fn cuda_major(&self) -> i32 {
        self.cuda_version / 1000
    }
}

/// `4096`, `24GiB`, `512 MiB`.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let shift = match text[digits..].trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_environment_is_one_h200() {
        let config = Config::from(|_| None);
        assert_eq!((config.n_devices, config.memory_bytes), (1, H200.memory_bytes));
        assert_eq!((config.cuda_major(), config.does_copy), (13, true));
    }

    #[test]
    fn reads_sizes_with_units() {
        let config = Config::from(|name| match name {
            MEMORY => Some("24 GiB".into()),
            DEVICES => Some("99".into()),
            GPU => Some("t4".into()),
            CUDA => Some("12080".into()),
            COPIES => Some("0".into()),
            _ => None,
        });
        assert_eq!(
            (config.memory_bytes, config.capacity_bytes, config.profile.name, config.n_devices),
            (24 << 30, 24 << 30, "t4", MAX_DEVICES)
        );
        assert_eq!((config.cuda_major(), config.does_copy), (12, false));
        assert_eq!(
            (parse_bytes("7MB"), parse_bytes(""), parse_bytes("512MiB")),
            (None, None, Some(512 << 20))
        );
        assert_eq!(parse_bytes("99999999999999 TiB"), None);
    }
}
