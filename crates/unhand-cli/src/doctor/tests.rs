//! The doctor on machines that are not there: each test is one environment and everything that is said about it.

use std::collections::BTreeMap;

use insta::assert_snapshot;
use unhand_analyze::Style;
use unhand_monitor::{
    Device, Memory, Mig, MigDevice, PidNamespace, Process, ProcessKind, Sample, Unreadable,
};

use super::diagnose;
use super::environment::{Environment, Machine, Silence};
use super::finding::{Level, Topic};
use super::interpreter::{Interpreter, Missing, Torch};
use super::text::render;

const GIB: u64 = 1 << 30;

fn memory(used_bytes: u64) -> Memory {
    let total_bytes = 139 * GIB;
    Memory {
        total_bytes: Some(total_bytes),
        used_bytes: Some(used_bytes),
        free_bytes: Some(total_bytes - used_bytes),
        reserved_bytes: Some(GIB),
    }
}

fn device(index: u32, uuid: &str) -> Device {
    Device {
        index,
        uuid: uuid.to_owned(),
        name: Some("NVIDIA H200".to_owned()),
        memory: memory(u64::from(index) * GIB),
        mig: Some(Mig::default()),
        processes: Some(Vec::new()),
    }
}

fn compute(pid: u32, used_bytes: Option<u64>) -> Process {
    Process { pid, used_bytes, kind: ProcessKind::Compute }
}

/// Two GPUs, a recent driver, PyTorch for it: nothing to complain about.
fn workstation() -> Environment {
    let packages = [
        ("IPython", Some("9.4.0")),
        ("accelerate", None),
        ("transformers", Some("5.17.0")),
        ("unhand", None),
    ];
    let packages = packages.map(|(name, version)| (name.to_owned(), version.map(str::to_owned)));
    Environment {
        variables: BTreeMap::new(),
        driver: Ok(Sample {
            driver_version: Some("580.95.05".to_owned()),
            cuda_driver_version: Some("13.0".to_owned()),
            devices: vec![device(0, "GPU-aa11"), device(1, "GPU-bb22")],
            unreadable: Vec::new(),
            has_foreign_pids: Some(false),
        }),
        machine: Machine {
            pids: PidNamespace { is_initial: Some(true), own_pids: vec![4711] },
            kernel: "Linux version 6.8.0".to_owned(),
            ..Machine::default()
        },
        python: Ok(Interpreter {
            executable: "/usr/bin/python3".to_owned(),
            version: "3.12.1".to_owned(),
            torch: Some(Torch {
                version: Some("2.11.0+cu130".to_owned()),
                cuda: Some("13.0".to_owned()),
                hip: None,
            }),
            packages: BTreeMap::from(packages),
        }),
    }
}

/// A machine whose loader finds no library of the driver.
fn without_driver() -> Environment {
    let silence = Silence {
        causes: vec![
            "the library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`".to_owned(),
            "not there".to_owned(),
        ],
        hint: Some("install the NVIDIA driver".to_owned()),
    };
    Environment { driver: Err(silence), ..workstation() }
}

impl Environment {
    fn with(mut self, name: &str, value: &str) -> Environment {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    fn sample(&mut self) -> &mut Sample {
        self.driver.as_mut().expect("this machine has a driver")
    }

    fn torch(&mut self) -> &mut Torch {
        self.python.as_mut().expect("Python").torch.as_mut().expect("PyTorch")
    }
}

/// The whole answer.
fn said(environment: &Environment) -> String {
    render(&diagnose(environment), Style::PLAIN, 100)
}

/// The answer about one topic: level, sentence, hint.
fn said_about(topic: Topic, environment: &Environment) -> String {
    let findings = diagnose(environment).findings;
    let lines = findings.iter().filter(|finding| finding.topic == topic).map(|finding| {
        let hint = finding.hint.as_ref().map_or(String::new(), |hint| format!("\n  hint: {hint}"));
        format!("{}: {}{hint}\n", finding.level, finding.sentence)
    });
    lines.collect()
}

fn problems(environment: &Environment) -> usize {
    diagnose(environment).count(Level::Problem)
}

#[test]
fn a_healthy_machine() {
    assert_snapshot!(said(&workstation()), @"
    Driver
      ok       The NVIDIA driver 580.95.05 answers and runs CUDA up to 13.0.

    Devices
      ok       cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
      ok       cuda:1 is device 1, NVIDIA H200 (GPU-bb22): 1.0 GiB of 139.0 GiB used.

    Python
      ok       PyTorch 2.11.0+cu130 is built for CUDA 13.0 (Python 3.12.1, /usr/bin/python3), which the
               driver runs.
      note     Also installed: IPython 9.4.0, transformers 5.17.0. Not installed, and not needed:
               accelerate.

    Settings
      ok       The allocator has its default settings.

    No problem found.
    ");
    assert_eq!(problems(&workstation()), 0);
}

#[test]
fn the_guide_shows_what_is_printed() {
    let guide = include_str!("../../../../docs/guides/doctor.md");
    let mut environment =
        workstation().with("CUDA_VISIBLE_DEVICES", "1").with("PYTORCH_CUDA_ALLOC_CONF", "max_split_size:64");
    environment.sample().devices[0].processes = Some(vec![compute(901, Some(64 * GIB))]);
    environment.sample().devices[0].memory = memory(64 * GIB);
    let said = said(&environment);
    assert!(guide.contains(&said), "docs/guides/doctor.md does not show\n{said}");
}

#[test]
fn a_machine_without_a_driver() {
    assert_snapshot!(said(&without_driver()), @"
    Driver
      problem  The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
               hint: install the NVIDIA driver

    Python
      ok       PyTorch 2.11.0+cu130 is built for CUDA 13.0 (Python 3.12.1, /usr/bin/python3).
      note     Also installed: IPython 9.4.0, transformers 5.17.0. Not installed, and not needed:
               accelerate.

    Settings
      ok       The allocator has its default settings.

    1 problem.
    ");
    assert_eq!(problems(&without_driver()), 1);
}

#[test]
fn containers_that_were_started_without_the_gpu() {
    let mut docker = without_driver();
    docker.machine.has_dockerenv = true;
    docker.machine.pids.is_initial = Some(false);
    let answer = said_about(Topic::Driver, &docker) + &said_about(Topic::Machine, &docker);
    assert_snapshot!(answer, @"
    problem: The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
      hint: start the container with access to the GPUs (`--gpus all`), on a host that has the driver
    note: This is a container (Docker) with process ids of its own.
    ");
    let hidden = docker.with("NVIDIA_VISIBLE_DEVICES", "void");
    assert_snapshot!(said_about(Topic::Driver, &hidden), @"
    problem: The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
      hint: start the container with access to the GPUs (`--gpus all`): NVIDIA_VISIBLE_DEVICES is `void`, which keeps them out
    ");
    let mut compute_only = without_driver().with("NVIDIA_DRIVER_CAPABILITIES", "compute");
    compute_only.machine.cgroup = "0::/kubepods/besteffort/pod7".to_owned();
    let answer = said_about(Topic::Driver, &compute_only) + &said_about(Topic::Machine, &compute_only);
    assert_snapshot!(answer, @"
    problem: The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
      hint: start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility: `compute` leaves out the library that answers for the driver
    note: This is a container (Kubernetes) with the process ids of its host.
    ");
}

#[test]
fn every_container_has_a_name() {
    let named = |change: &dyn Fn(&mut Environment)| {
        let mut environment = workstation();
        change(&mut environment);
        said_about(Topic::Machine, &environment)
    };
    let in_cgroup = |path: &'static str| {
        move |environment: &mut Environment| path.clone_into(&mut environment.machine.cgroup)
    };
    assert!(named(&|environment| environment.machine.has_containerenv = true).contains("(Podman)"));
    assert!(named(&in_cgroup("12:pids:/docker/0a1b")).contains("(Docker)"));
    assert!(named(&in_cgroup("0::/lxc.payload.web")).contains("(LXC)"));
    assert!(named(&in_cgroup("0::/system.slice/containerd.service")).contains("(containerd)"));
    assert!(named(&in_cgroup("0::/kubepods.slice/pod1")).contains("(Kubernetes)"));
    let apptainer = workstation().with("APPTAINER_CONTAINER", "/images/torch.sif");
    assert!(said_about(Topic::Machine, &apptainer).contains("(Apptainer) with the process ids of its host"));
    let alone = named(&|environment| environment.machine.pids.is_initial = Some(false));
    assert!(alone.contains("namespace with process ids of its own"), "{alone}");
    assert_eq!(named(&in_cgroup("0::/user.slice/user-1000.slice")), "");
}

#[test]
fn windows_manages_the_memory_under_wsl() {
    let mut environment = workstation();
    environment.machine.kernel = "Linux version 5.15.167.4-microsoft-standard-WSL2".to_owned();
    environment.machine.has_dxg = true;
    environment.sample().devices.truncate(1);
    environment.sample().devices[0].processes = Some(vec![compute(99, None)]);
    let answer = said_about(Topic::Devices, &environment) + &said_about(Topic::Machine, &environment);
    assert_snapshot!(answer, @"
    ok: cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    note: 1 process uses device 0: 99 (n/a).
    note: The driver does not say how much memory each process holds.
    note: This is WSL: Windows manages the GPU's memory, moves some of it to host memory when it is full, and does not say what each process holds.
    ");
    let mut silent = without_driver();
    silent.machine = environment.machine;
    assert_snapshot!(said_about(Topic::Driver, &silent), @"
    problem: The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
      hint: install the NVIDIA driver in Windows, never inside WSL, and run `wsl --shutdown` there
    ");
    silent.machine.has_dxg = false;
    assert_snapshot!(said_about(Topic::Driver, &silent), @"
    problem: The library of the NVIDIA driver cannot be loaded: `libnvidia-ml.so.1`: not there.
      hint: run `wsl --update` in Windows: this WSL has no `/dev/dxg`, through which it reaches the GPU
    ");
}

#[test]
fn devices_and_who_uses_them() {
    let mut environment = workstation();
    let sample = environment.sample();
    // Our own process is not somebody else.
    sample.devices[0].processes = Some(vec![compute(4711, Some(GIB))]);
    sample.devices[1].processes = Some((1..=7).map(|pid| compute(pid, Some(u64::from(pid) * GIB))).collect());
    sample.devices[1].memory = Memory::default();
    sample.unreadable = vec![Unreadable { index: 2, reason: "device fell off the bus".to_owned() }];
    sample.has_foreign_pids = Some(true);
    assert_snapshot!(said_about(Topic::Devices, &environment), @"
    ok: cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    ok: cuda:1 is device 1, NVIDIA H200 (GPU-bb22): how much memory it has is not known.
    note: 7 processes use device 1: 7 (7.0 GiB), 6 (6.0 GiB), 5 (5.0 GiB), 4 (4.0 GiB), 3 (3.0 GiB), and 2 more.
    warning: Device 2 does not answer: device fell off the bus.
    note: The ids of the processes are the host's, which mean other processes in here.
      hint: start the container with the host's process ids (`--pid=host`) to compare them
    ");
    environment.sample().devices[1].processes = None;
    assert_snapshot!(said_about(Topic::Devices, &environment), @"
    ok: cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    ok: cuda:1 is device 1, NVIDIA H200 (GPU-bb22): how much memory it has is not known.
    warning: Device 2 does not answer: device fell off the bus.
    note: The driver does not say which processes use a device.
    note: The ids of the processes are the host's, which mean other processes in here.
      hint: start the container with the host's process ids (`--pid=host`) to compare them
    ");
    environment.sample().devices.clear();
    assert_snapshot!(said_about(Topic::Devices, &environment), @"
    warning: Device 2 does not answer: device fell off the bus.
    problem: The driver shows no device.
      hint: look at `nvidia-smi -L` on the host; a container has the devices it was started with
    ");
}

#[test]
fn devices_that_are_hidden() {
    let about = |value: &str| said_about(Topic::Devices, &workstation().with("CUDA_VISIBLE_DEVICES", value));
    assert_snapshot!(about("1"), @"
    note: Device 0, NVIDIA H200 (GPU-aa11), is hidden from this process: 0 B of 139.0 GiB used.
    ok: cuda:0 is device 1, NVIDIA H200 (GPU-bb22): 1.0 GiB of 139.0 GiB used.
    ");
    assert_snapshot!(about("GPU-bb,GPU-aa"), @"
    ok: cuda:1 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    ok: cuda:0 is device 1, NVIDIA H200 (GPU-bb22): 1.0 GiB of 139.0 GiB used.
    ");
    // On purpose, but worth a look.
    assert_snapshot!(about(""), @"
    note: Device 0, NVIDIA H200 (GPU-aa11), is hidden from this process: 0 B of 139.0 GiB used.
    note: Device 1, NVIDIA H200 (GPU-bb22), is hidden from this process: 1.0 GiB of 139.0 GiB used.
    warning: CUDA_VISIBLE_DEVICES: it is empty, which hides all devices.
      hint: unset it to see all devices, or list numbers or identifiers from above, separated by commas
    ");
    // Hardly on purpose.
    assert_snapshot!(about("0,2"), @"
    ok: cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    note: Device 1, NVIDIA H200 (GPU-bb22), is hidden from this process: 1.0 GiB of 139.0 GiB used.
    warning: CUDA_VISIBLE_DEVICES=0,2: there is no device `2`, which ends the list.
      hint: unset it to see all devices, or list numbers or identifiers from above, separated by commas
    ");
    assert_snapshot!(about("2,0"), @"
    note: Device 0, NVIDIA H200 (GPU-aa11), is hidden from this process: 0 B of 139.0 GiB used.
    note: Device 1, NVIDIA H200 (GPU-bb22), is hidden from this process: 1.0 GiB of 139.0 GiB used.
    problem: CUDA_VISIBLE_DEVICES=2,0: there is no device `2`, which ends the list.
      hint: unset it to see all devices, or list numbers or identifiers from above, separated by commas
    ");
}

#[test]
fn devices_of_different_models_have_uncertain_numbers() {
    let mut environment = workstation();
    environment.sample().devices[1].name = Some("NVIDIA T4".to_owned());
    assert_snapshot!(said_about(Topic::Devices, &environment), @"
    ok: cuda:0 is device 0, NVIDIA H200 (GPU-aa11): 0 B of 139.0 GiB used.
    ok: cuda:1 is device 1, NVIDIA T4 (GPU-bb22): 1.0 GiB of 139.0 GiB used.
    warning: The devices are of different models, and CUDA numbers the fastest first: its numbers may differ from those of nvidia-smi and from the ones above.
      hint: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by their identifiers
    ");
    let by_bus = said_about(Topic::Devices, &environment.with("CUDA_DEVICE_ORDER", "PCI_BUS_ID"));
    assert!(!by_bus.contains("warning"), "{by_bus}");
}

#[test]
fn parts_of_divided_devices() {
    let part = |index: u32, uuid: &str| MigDevice {
        index,
        uuid: uuid.to_owned(),
        name: Some("MIG 3g.71gb".to_owned()),
        memory: Memory { total_bytes: Some(69 * GIB), used_bytes: Some(GIB), ..Memory::default() },
        processes: None,
    };
    let mut environment = workstation();
    let devices = &mut environment.sample().devices;
    devices[0].mig = Some(Mig { is_enabled: true, devices: vec![part(0, "MIG-11"), part(1, "MIG-22")] });
    devices[1].mig = Some(Mig { is_enabled: true, devices: Vec::new() });
    let environment = environment.with("CUDA_VISIBLE_DEVICES", "MIG-22");
    assert_snapshot!(said_about(Topic::Devices, &environment), @"
    ok: cuda:0 is part 1 (MIG-22) of device 0, NVIDIA H200 (GPU-aa11): 1.0 GiB of 69.0 GiB used.
    note: Device 0 is in MIG mode and has 2 parts; a process sees one of them.
      hint: choose one with CUDA_VISIBLE_DEVICES, for example `MIG-22`
    note: Device 1, NVIDIA H200 (GPU-bb22), is hidden from this process: 1.0 GiB of 139.0 GiB used.
    warning: Device 1 is in MIG mode and has no part, so that nobody can use it.
      hint: make parts with `nvidia-smi mig -cgi … -C`, or leave MIG mode with `nvidia-smi -mig 0`
    ");
}

#[test]
fn releases_of_pytorch_and_of_the_driver() {
    let mut environment = workstation();
    let mut about = |cuda: Option<&str>, hip: Option<&str>, version: &str| {
        let torch = environment.torch();
        torch.cuda = cuda.map(str::to_owned);
        torch.hip = hip.map(str::to_owned);
        torch.version = Some(version.to_owned());
        let answer = said_about(Topic::Python, &environment);
        answer.split_once("note: Also installed").map_or(answer.clone(), |(first, _)| first.to_owned())
    };
    assert_snapshot!(about(Some("12.8"), None, "2.9.1+cu128"), @"
    ok: PyTorch 2.9.1+cu128 is built for CUDA 12.8 (Python 3.12.1, /usr/bin/python3), which the driver runs.
    ");
    assert_snapshot!(about(Some("13.2"), None, "2.15.0+cu132"), @"
    note: PyTorch 2.15.0+cu132 is built for CUDA 13.2 (Python 3.12.1, /usr/bin/python3); the driver is older (13.0) but of the same major version, which is enough.
    ");
    assert_snapshot!(about(Some("14.0"), None, "2.16.0+cu140"), @"
    problem: PyTorch 2.16.0+cu140 is built for CUDA 14.0 (Python 3.12.1, /usr/bin/python3); the driver runs CUDA up to 13.0 and will refuse it.
      hint: update the driver, or install a build of PyTorch for CUDA 13
    warning: The rules of PyTorch 2.16.0+cu140 are not known: a replay follows those of 2.4 to 2.15.
    ");
    assert_snapshot!(about(None, None, "2.11.0+cpu"), @"
    problem: PyTorch 2.11.0+cpu is built without CUDA (Python 3.12.1, /usr/bin/python3): it uses no GPU.
      hint: install a build of PyTorch for CUDA; its version ends in `+cu` and a number
    ");
    assert_snapshot!(about(None, Some("7.1"), "2.11.0+rocm7.1"), @"
    warning: PyTorch 2.11.0+rocm7.1 is built for ROCm 7.1 (Python 3.12.1, /usr/bin/python3); unhand looks at CUDA devices.
    ");
}

#[test]
fn python_without_pytorch_and_no_python() {
    let mut environment = workstation();
    let python = environment.python.as_mut().expect("Python");
    python.torch = None;
    python.version = "3.9.18".to_owned();
    python.packages = BTreeMap::from([("IPython".to_owned(), None)]);
    assert_snapshot!(said_about(Topic::Python, &environment), @"
    warning: Python 3.9.18 (/usr/bin/python3) is older than 3.10, which the package `unhand` needs.
    warning: PyTorch is not installed for Python 3.9.18 (/usr/bin/python3).
      hint: name the interpreter of your programs with `--python`, or install PyTorch for this one
    note: Not installed, and not needed: IPython.
    ");
    environment.python = Err(Missing { executable: "python3".to_owned(), reason: "not there".to_owned() });
    assert_snapshot!(said_about(Topic::Python, &environment), @"
    warning: Python does not answer: `python3`: not there.
      hint: name the interpreter of your programs with `--python`
    ");
    assert_eq!(problems(&environment), 0, "a machine may have no Python");
}

#[test]
fn settings_of_the_allocator() {
    let about =
        |value: &str| said_about(Topic::Settings, &workstation().with("PYTORCH_CUDA_ALLOC_CONF", value));
    assert_snapshot!(about("expandable_segments:True,max_split_size_mb:64"), @"
    ok: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:64 is understood.
    ");
    assert_snapshot!(about("max_split_size:64"), @"
    problem: PYTORCH_CUDA_ALLOC_CONF=max_split_size:64 is refused by PyTorch 2.11: unrecognized key: `max_split_size`.
      hint: did you mean `max_split_size_mb`?
    ");
    assert_snapshot!(about("expandable_segments_reserve:1.0"), @"
    problem: PYTORCH_CUDA_ALLOC_CONF=expandable_segments_reserve:1.0 is refused by PyTorch 2.11: key `expandable_segments_reserve` is not known to torch 2.11.
    ");
    assert_snapshot!(about("garbage_collection_threshold:7"), @"
    problem: PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:7 is refused by PyTorch 2.11: bad value for `garbage_collection_threshold`: `7` (between 0 and 1, both excluded).
    ");
    assert_snapshot!(about("backend:cudaMallocAsync"), @"
    warning: PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: CUDA's own allocator instead of PyTorch's; it keeps no segments, and unhand can neither explain nor replay what it caches.
    ");
    assert_snapshot!(about(""), @"
    ok: PYTORCH_CUDA_ALLOC_CONF is empty: default settings.
    ");
}

#[test]
fn settings_under_both_names() {
    let both = |first: &str, second: &str| {
        let environment =
            workstation().with("PYTORCH_CUDA_ALLOC_CONF", first).with("PYTORCH_ALLOC_CONF", second);
        said_about(Topic::Settings, &environment)
    };
    assert_snapshot!(both("expandable_segments:True", "max_split_size_mb:64"), @"
    ok: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is understood.
    warning: PYTORCH_ALLOC_CONF=max_split_size_mb:64 has no effect: where both are set, PyTorch's allocator for CUDA reads PYTORCH_CUDA_ALLOC_CONF alone, although PyTorch documents the other as the primary one.
      hint: unset one of them; what was in effect is in a snapshot, and `unhand explain --json` shows it as `settings`
    ");
    assert!(!both("expandable_segments:True", "expandable_segments:True").contains("no effect"));
    // Nobody reads it, so that nobody refuses it.
    assert!(!both("expandable_segments:True", "shoe_size:42").contains("refused"));
    let newer = workstation().with("PYTORCH_ALLOC_CONF", "shoe_size:42");
    assert_eq!(problems(&newer), 1);
}

#[test]
fn variables_that_cost_memory_or_time() {
    let environment = workstation()
        .with("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        .with("CUDA_LAUNCH_BLOCKING", "1")
        .with("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
        .with("CUDA_MODULE_LOADING", "EAGER");
    assert_snapshot!(said_about(Topic::Settings, &environment), @"
    ok: The allocator has its default settings.
    warning: PYTORCH_NO_CUDA_MEMORY_CACHING=1: PyTorch asks the driver for every tensor, which is slow, counts nothing as allocated or reserved, and leaves snapshots empty.
      hint: unset it, unless you look for an access out of bounds
    note: CUDA_LAUNCH_BLOCKING=1: the program waits for every kernel, which is slow.
      hint: unset it when you have found the error you are looking for
    note: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8: each pair of a cuBLAS handle and a stream keeps 8.1 MiB as workspace.
    warning: CUDA_MODULE_LOADING=EAGER: every kernel of every library is loaded at the start, into memory outside PyTorch's allocator.
      hint: unset it, or set it to LAZY: kernels are loaded when they are first used
    ");
    let environment = workstation()
        .with("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
        .with("CUDA_LAUNCH_BLOCKING", "0")
        .with("CUBLAS_WORKSPACE_CONFIG", "4096:8")
        .with("CUDA_MODULE_LOADING", "lazy");
    assert_snapshot!(said_about(Topic::Settings, &environment), @"
    ok: The allocator has its default settings.
    warning: CUBLAS_WORKSPACE_CONFIG=4096:8 is not of the form `:SIZE:COUNT`.
      hint: for example `:4096:8`, eight buffers of 4096 KiB
    warning: CUDA_MODULE_LOADING=lazy is neither LAZY nor EAGER.
    ");
}

#[test]
fn json_has_the_findings_and_what_they_are_made_of() {
    let mut environment = workstation().with("CUDA_VISIBLE_DEVICES", "1");
    environment.sample().devices[0].memory = Memory::default();
    let answer = serde_json::to_value(diagnose(&environment)).expect("JSON");
    assert_eq!(answer["schema_version"], 1);
    let first = &answer["findings"][0];
    assert_eq!((&first["topic"], &first["level"]), (&"driver".into(), &"ok".into()));
    let devices = &answer["devices"];
    assert_eq!(devices[0]["torch_index"], serde_json::Value::Null);
    assert_eq!(devices[0]["used_bytes"], serde_json::Value::Null, "what is not known is null, never 0");
    assert_eq!((&devices[1]["torch_index"], &devices[1]["used_bytes"]), (&0.into(), &GIB.into()));
    assert_eq!(answer["python"]["torch"]["cuda"], "13.0");
}
