//! GPUs the stand-in can stand in for: what their drivers and data sheets say about them.
//!
//! Where a figure comes from: `h200` was read off a device (driver 580.159) with `cuDeviceGetAttribute` and
//! `cudaMemGetInfo`. For the others, compute capability and what follows from it (threads, blocks and shared
//! memory of a multiprocessor) are in NVIDIA's *CUDA C++ Programming Guide*, table "Technical Specifications per
//! Compute Capability"; multiprocessors and L2 cache are in the architecture whitepaper named beside the profile.
//! Memory is the "total capacity" in PyTorch's out-of-memory messages that people have published for that GPU:
//! known to 0.01 GiB, and differing a little between drivers; the range seen is beside the profile. Context sizes
//! are measured for `h200` only; the others are that figure scaled by multiprocessors, a guess.

const MIB: u64 = 1 << 20;

/// What a program can ask about a GPU and what decides whether its memory suffices.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The name on the command line.
    pub name: &'static str,
    /// The name the device states, with a note that it is not there.
    pub device_name: &'static str,
    /// Total memory, as `cudaMemGetInfo` states it.
    pub memory_bytes: u64,
    /// Used by a process that has a context and nothing else.
    pub context_bytes: u64,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub n_multiprocessors: i32,
    /// Resident threads of one of them.
    pub threads_per_multiprocessor: i32,
    /// Resident blocks of one of them.
    pub blocks_per_multiprocessor: i32,
    /// Shared memory of one of them.
    pub shared_bytes_per_multiprocessor: i32,
    /// L2 cache.
    pub l2_bytes: i32,
    /// Width of the memory bus.
    pub bus_bits: i32,
    /// Whether these figures were read off a device by this project.
    pub is_measured: bool,
}

impl Profile {
    /// The profile of a name, in any case.
    pub fn named(name: &str) -> Option<&'static Profile> {
        PROFILES.iter().copied().find(|profile| profile.name.eq_ignore_ascii_case(name.trim()))
    }

    /// The version of the kernels that run on it, as `86`: of the architectures that PyTorch's wheels are built for, the
    /// latest that the GPU can run. CUB has no answer for another one, and fails.
    pub fn binary_version(&self) -> i32 {
        match self.capability {
            // No wheel has kernels of Ada's own; those for Ampere run there.
            (8, 9) => 86,
            (major, minor) => major * 10 + minor,
        }
    }

    /// Shared memory that one block can ask for: all but the 1 KiB the system keeps, and on Turing all of it.
    pub fn shared_bytes_opt_in(&self) -> i32 {
        if self.capability.0 < 8 {
            self.shared_bytes_per_multiprocessor
        } else {
            self.shared_bytes_per_multiprocessor - 1024
        }
    }
}

/// Hopper; measured.
pub(crate) static H200: Profile = Profile {
    name: "h200",
    device_name: "NVIDIA H200 (unhand stand-in)",
    memory_bytes: 150_109_880_320,
    context_bytes: 552_402_944,
    capability: (9, 0),
    n_multiprocessors: 132,
    threads_per_multiprocessor: 2048,
    blocks_per_multiprocessor: 32,
    shared_bytes_per_multiprocessor: 233_472,
    l2_bytes: 62_914_560,
    bus_bits: 6016,
    is_measured: true,
};

/// Hopper, SXM5; "NVIDIA H100 Tensor Core GPU Architecture" for multiprocessors, L2 and bus.
static H100_80: Profile = Profile {
    name: "h100-80",
    device_name: "NVIDIA H100 80GB HBM3 (unhand stand-in)",
    // 79.11 GiB.
    memory_bytes: 81_008 * MIB,
    context_bytes: 527 * MIB,
    bus_bits: 5120,
    l2_bytes: 52_428_800,
    is_measured: false,
    ..H200
};

/// Ampere; "NVIDIA A100 Tensor Core GPU Architecture" for multiprocessors, L2 and bus.
static A100_40: Profile = Profile {
    name: "a100-40",
    device_name: "NVIDIA A100-SXM4-40GB (unhand stand-in)",
    // 39.39 to 39.59 GiB.
    memory_bytes: 40_448 * MIB,
    context_bytes: 431 * MIB,
    capability: (8, 0),
    n_multiprocessors: 108,
    threads_per_multiprocessor: 2048,
    blocks_per_multiprocessor: 32,
    shared_bytes_per_multiprocessor: 167_936,
    l2_bytes: 41_943_040,
    bus_bits: 5120,
    is_measured: false,
};

/// The same chip with more memory.
static A100_80: Profile = Profile {
    name: "a100-80",
    device_name: "NVIDIA A100-SXM4-80GB (unhand stand-in)",
    // 79.15 to 79.33 GiB.
    memory_bytes: 81_152 * MIB,
    ..A100_40
};

/// Ada; "NVIDIA Ada GPU Architecture" for the family, the L4 data sheet for memory and bus.
static L4: Profile = Profile {
    name: "l4",
    device_name: "NVIDIA L4 (unhand stand-in)",
    // `nvidia-smi` shows 23,034 MiB on such a machine; about 2 % of it is kept by the driver.
    memory_bytes: 22_560 * MIB,
    context_bytes: 231 * MIB,
    capability: (8, 9),
    n_multiprocessors: 58,
    threads_per_multiprocessor: 1536,
    blocks_per_multiprocessor: 24,
    shared_bytes_per_multiprocessor: 102_400,
    l2_bytes: 50_331_648,
    bus_bits: 192,
    is_measured: false,
};

/// Ada; "NVIDIA Ada GPU Architecture", appendix on the RTX 4090.
static RTX4090: Profile = Profile {
    name: "rtx4090",
    device_name: "NVIDIA GeForce RTX 4090 (unhand stand-in)",
    // 23.61 to 23.68 GiB.
    memory_bytes: 24_207 * MIB,
    context_bytes: 511 * MIB,
    n_multiprocessors: 128,
    l2_bytes: 75_497_472,
    bus_bits: 384,
    ..L4
};

/// Ampere; "NVIDIA Ampere GA102 GPU Architecture" for the family, the product page for the 28 multiprocessors.
static RTX3060_12: Profile = Profile {
    name: "rtx3060-12",
    device_name: "NVIDIA GeForce RTX 3060 (unhand stand-in)",
    // 11.75 to 11.76 GiB.
    memory_bytes: 12_042 * MIB,
    context_bytes: 111 * MIB,
    capability: (8, 6),
    n_multiprocessors: 28,
    threads_per_multiprocessor: 1536,
    blocks_per_multiprocessor: 16,
    shared_bytes_per_multiprocessor: 102_400,
    l2_bytes: 2_359_296,
    bus_bits: 192,
    is_measured: false,
};

/// Turing; "NVIDIA Turing GPU Architecture", appendix on the T4.
static T4: Profile = Profile {
    name: "t4",
    device_name: "Tesla T4 (unhand stand-in)",
    // 14.56 to 14.75 GiB.
    memory_bytes: 14_910 * MIB,
    context_bytes: 159 * MIB,
    capability: (7, 5),
    n_multiprocessors: 40,
    threads_per_multiprocessor: 1024,
    blocks_per_multiprocessor: 16,
    shared_bytes_per_multiprocessor: 65_536,
    l2_bytes: 4_194_304,
    bus_bits: 256,
    is_measured: false,
};

/// All profiles, largest first.
pub static PROFILES: &[&Profile] = &[&H200, &A100_80, &H100_80, &A100_40, &RTX4090, &L4, &T4, &RTX3060_12];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_says_that_it_is_not_there() {
        for profile in PROFILES {
            assert!(profile.device_name.ends_with("(unhand stand-in)"), "{}", profile.name);
            assert!(profile.context_bytes < profile.memory_bytes / 8, "{}", profile.name);
            assert_eq!(Profile::named(&profile.name.to_uppercase()), Some(*profile));
        }
        assert_eq!(Profile::named("v100"), None);
        assert_eq!(L4.binary_version(), 86);
    }
}
