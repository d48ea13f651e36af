//! Findings about the driver and the machine: does the driver answer, and is this a container or WSL.

use super::environment::{Environment, Machine, Silence};
use super::finding::{Finding, Level, Topic};

pub(super) fn findings(environment: &Environment) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &environment.driver {
        Ok(sample) => {
            let version = sample.driver_version.as_deref().unwrap_or("of an unknown version");
            let cuda = match &sample.cuda_driver_version {
                Some(cuda) => format!(" and runs CUDA up to {cuda}"),
                None => String::new(),
            };
            let sentence = format!("The NVIDIA driver {version} answers{cuda}.");
            findings.push(Finding::new(Topic::Driver, Level::Ok, sentence));
        }
        Err(silence) => findings.push(silent(silence, environment)),
    }
    findings.extend(machine(environment));
    findings
}

fn silent(silence: &Silence, environment: &Environment) -> Finding {
    let causes = silence.causes.join(": ");
    let mut letters = causes.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string()).unwrap_or_default();
    let sentence = format!("{first}{}.", letters.as_str());
    let finding = Finding::new(Topic::Driver, Level::Problem, sentence);
    match hint_of_machine(environment).or_else(|| silence.hint.clone()) {
        Some(hint) => finding.hint(hint),
        None => finding,
    }
}

/// What to do where the machine says more than the driver's error.
fn hint_of_machine(environment: &Environment) -> Option<String> {
    let machine = &environment.machine;
    if machine.is_wsl() {
        let hint = if machine.has_dxg {
            "install the NVIDIA driver in Windows, never inside WSL, and run `wsl --shutdown` there"
        } else {
            "run `wsl --update` in Windows: this WSL has no `/dev/dxg`, through which it reaches the GPU"
        };
        return Some(hint.to_owned());
    }
    // The two variables of NVIDIA's container runtime.
    if let Some(devices) = environment.variable("NVIDIA_VISIBLE_DEVICES")
        && matches!(devices.trim(), "" | "void" | "none")
    {
        return Some(format!(
            "start the container with access to the GPUs (`--gpus all`): NVIDIA_VISIBLE_DEVICES is `{devices}`, which \
             keeps them out"
        ));
    }
    if let Some(capabilities) = environment.variable("NVIDIA_DRIVER_CAPABILITIES")
        && !capabilities.split(',').any(|word| matches!(word.trim(), "all" | "utility"))
    {
        return Some(format!(
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility: `{capabilities}` leaves out the \
             library that answers for the driver"
        ));
    }
    let hint = match container(environment)? {
        "Kubernetes" => {
            "ask for a GPU in the pod's resources (`nvidia.com/gpu: 1`), on a node that has the driver"
        }
        "Apptainer" => "start the container with `--nv`, on a host that has the driver",
        _ => "start the container with access to the GPUs (`--gpus all`), on a host that has the driver",
    };
    Some(hint.to_owned())
}

fn machine(environment: &Environment) -> Vec<Finding> {
    let machine = &environment.machine;
    let mut findings = Vec::new();
    let mut note = |sentence: String| findings.push(Finding::new(Topic::Machine, Level::Note, sentence));
    match container(environment) {
        Some(kind) if machine.pids.is_initial == Some(false) => {
            note(format!("This is a container ({kind}) with process ids of its own."));
        }
        Some(kind) => note(format!("This is a container ({kind}) with the process ids of its host.")),
        None if machine.pids.is_initial == Some(false) => {
            note("This process is in a namespace with process ids of its own, as in a container.".to_owned());
        }
        None => {}
    }
    if machine.is_wsl() {
        note(
            "This is WSL: Windows manages the GPU's memory, moves some of it to host memory when it is full, and does \
             not say what each process holds."
                .to_owned(),
        );
    }
    findings
}

/// The kind of container, by what each leaves behind.
fn container(environment: &Environment) -> Option<&'static str> {
    let Machine { has_dockerenv, has_containerenv, cgroup, .. } = &environment.machine;
    let is_set = |name| environment.variable(name).is_some();
    if is_set("KUBERNETES_SERVICE_HOST") || cgroup.contains("kubepods") {
        Some("Kubernetes")
    } else if is_set("APPTAINER_CONTAINER") || is_set("SINGULARITY_CONTAINER") {
        Some("Apptainer")
    } else if *has_containerenv || cgroup.contains("libpod") {
        Some("Podman")
    } else if *has_dockerenv || cgroup.contains("docker") {
        Some("Docker")
    } else if cgroup.contains("/lxc") {
        Some("LXC")
    } else if cgroup.contains("containerd") {
        Some("containerd")
    } else {
        None
    }
}
