//! What the doctor looks at, gathered in one place. Judges nothing: that is a pure function of what is here.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::path::Path;

use unhand_monitor::{Nvml, PidNamespace, Sample, Sampler};

use super::interpreter::{Interpreter, Missing};

/// The variables that matter to PyTorch's memory, or to who sees which device.
const VARIABLES: &[&str] = &[
    "APPTAINER_CONTAINER",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "KUBERNETES_SERVICE_HOST",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "SINGULARITY_CONTAINER",
];

/// Everything the findings are made of.
#[derive(Debug)]
pub(crate) struct Environment {
    /// Those of [`VARIABLES`] that are set.
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) driver: Result<Sample, Silence>,
    pub(crate) machine: Machine,
    pub(crate) python: Result<Interpreter, Missing>,
}

/// Why the driver does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Silence {
    /// What is wrong, outermost first.
    pub(crate) causes: Vec<String>,
    pub(crate) hint: Option<String>,
}

/// Files that tell what kind of machine this is, as they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    /// `/.dockerenv` is there.
    pub(crate) has_dockerenv: bool,
    /// `/run/.containerenv` is there.
    pub(crate) has_containerenv: bool,
    /// `/proc/self/cgroup`
    pub(crate) cgroup: String,
    /// `/proc/version`
    pub(crate) kernel: String,
    /// `/dev/dxg` is there: the GPU of WSL.
    pub(crate) has_dxg: bool,
    pub(crate) pids: PidNamespace,
}

impl Environment {
    /// Looks at this machine.
    pub(crate) fn gather(python: Result<Interpreter, Missing>) -> Environment {
        let variable =
            |name: &&str| Some(((*name).to_owned(), std::env::var_os(name)?.to_string_lossy().into_owned()));
        Environment {
            variables: VARIABLES.iter().filter_map(variable).collect(),
            driver: Nvml::load().and_then(|mut nvml| nvml.sample()).map_err(|error| silence(&error)),
            machine: Machine::read(),
            python,
        }
    }

    /// The value of a variable; empty is a value.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

impl Machine {
    fn read() -> Machine {
        let text = |path| fs_err::read_to_string(path).unwrap_or_default();
        Machine {
            has_dockerenv: Path::new("/.dockerenv").exists(),
            has_containerenv: Path::new("/run/.containerenv").exists(),
            cgroup: text("/proc/self/cgroup"),
            kernel: text("/proc/version"),
            has_dxg: Path::new("/dev/dxg").exists(),
            pids: PidNamespace::read(),
        }
    }

    /// Whether Linux runs inside Windows.
    pub(crate) fn is_wsl(&self) -> bool {
        self.kernel.to_ascii_lowercase().contains("microsoft")
    }
}

fn silence(error: &unhand_monitor::Error) -> Silence {
    let mut causes = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // Some errors repeat their source in their own text; once is enough.
        if !causes.last().is_some_and(|last| last.contains(&text)) {
            causes.push(text);
        }
        cause = error.source();
    }
    Silence { causes, hint: error.hint().map(str::to_owned) }
}
