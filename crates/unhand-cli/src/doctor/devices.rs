//! Findings about the devices: how PyTorch calls each, what is used and by whom, which are hidden.

use unhand_analyze::Bytes;
use unhand_monitor::{Device, Ended, Memory, Process, Sample, Selection, Visible, VisibleDevice, visible};

use super::environment::Environment;
use super::finding::{Finding, Level, SeenDevice, Topic};

/// More processes than this on one device are counted and not listed.
const MAX_PROCESSES: usize = 5;

/// The devices, and what there is to say about them; nothing of either where the driver does not answer.
pub(super) fn findings(environment: &Environment) -> (Vec<SeenDevice>, Vec<Finding>) {
    let Ok(sample) = &environment.driver else { return (Vec::new(), Vec::new()) };
    let visible_devices = environment.variable("CUDA_VISIBLE_DEVICES");
    let device_order = environment.variable("CUDA_DEVICE_ORDER");
    let visible = visible(sample, Selection { visible_devices, device_order });
    let mut findings = Vec::new();
    for device in &sample.devices {
        findings.push(of_device(device, &visible));
        findings.extend(divided(device));
        findings.extend(users(device, environment));
    }
    for device in &sample.unreadable {
        let sentence = format!("Device {} does not answer: {}.", device.index, device.reason);
        findings.push(Finding::new(Topic::Devices, Level::Warning, sentence));
    }
    if sample.devices.is_empty() {
        let finding = Finding::new(Topic::Devices, Level::Problem, "The driver shows no device.");
        findings
            .push(finding.hint(
                "look at `nvidia-smi -L` on the host; a container has the devices it was started with",
            ));
    }
    findings.extend(selection(sample, &visible, visible_devices));
    findings.extend(accounting(sample));
    let seen = sample.devices.iter().map(|device| SeenDevice {
        index: device.index,
        uuid: device.uuid.clone(),
        name: device.name.clone(),
        torch_index: torch_index(device, &visible).map(|(index, _)| index),
        memory: device.memory,
        mig: device.mig.clone(),
    });
    (seen.collect(), findings)
}

/// The number in `cuda:N` of a device or of a part of it.
fn torch_index<'a>(device: &Device, visible: &'a Visible) -> Option<(usize, &'a VisibleDevice)> {
    visible.devices.iter().enumerate().find(|(_, seen)| seen.index == device.index)
}

fn of_device(device: &Device, visible: &Visible) -> Finding {
    let name = device.name.as_deref().unwrap_or("of an unknown model");
    let Device { index, uuid, .. } = device;
    match torch_index(device, visible) {
        None => {
            let memory = memory(&device.memory);
            let sentence = format!("Device {index}, {name} ({uuid}), is hidden from this process: {memory}.");
            Finding::new(Topic::Devices, Level::Note, sentence)
        }
        Some((torch_index, VisibleDevice { mig_index: Some(part), uuid: part_uuid, .. })) => {
            let parts = device.mig.iter().flat_map(|mig| &mig.devices);
            let of_part = parts.filter(|part| part.uuid == *part_uuid).map(|part| part.memory).next();
            let memory = memory(&of_part.unwrap_or_default());
            let sentence = format!(
                "cuda:{torch_index} is part {part} ({part_uuid}) of device {index}, {name} ({uuid}): {memory}."
            );
            Finding::new(Topic::Devices, Level::Ok, sentence)
        }
        Some((torch_index, _)) => {
            let memory = memory(&device.memory);
            let sentence = format!("cuda:{torch_index} is device {index}, {name} ({uuid}): {memory}.");
            Finding::new(Topic::Devices, Level::Ok, sentence)
        }
    }
}

fn memory(memory: &Memory) -> String {
    match (memory.used_bytes, memory.total_bytes) {
        (Some(used), Some(total)) => format!("{} of {} used", Bytes(used), Bytes(total)),
        (None, Some(total)) => format!("{}, how much is used is not known", Bytes(total)),
        _ => "how much memory it has is not known".to_owned(),
    }
}

fn divided(device: &Device) -> Option<Finding> {
    let mig = device.mig.as_ref().filter(|mig| mig.is_enabled)?;
    let index = device.index;
    let finding = |level, sentence| Finding::new(Topic::Devices, level, sentence);
    Some(match mig.devices.as_slice() {
        [] => finding(
            Level::Warning,
            format!("Device {index} is in MIG mode and has no part, so that nobody can use it."),
        )
        .hint("make parts with `nvidia-smi mig -cgi … -C`, or leave MIG mode with `nvidia-smi -mig 0`"),
        [_] => finding(Level::Note, format!("Device {index} is in MIG mode and has 1 part.")),
        parts => {
            let n_parts = parts.len();
            finding(
                Level::Note,
                format!("Device {index} is in MIG mode and has {n_parts} parts; a process sees one of them."),
            )
            .hint(format!("choose one with CUDA_VISIBLE_DEVICES, for example `{}`", parts[n_parts - 1].uuid))
        }
    })
}

/// Who else holds memory of a device.
fn users(device: &Device, environment: &Environment) -> Option<Finding> {
    let own = environment.machine.pids.own_pids.last();
    let processes = device.processes.as_ref()?;
    let mut others: Vec<&Process> = processes.iter().filter(|process| Some(&process.pid) != own).collect();
    others.sort_by_key(|process| std::cmp::Reverse(process.used_bytes));
    let names: Vec<String> = others
        .iter()
        .take(MAX_PROCESSES)
        .map(|process| match process.used_bytes {
            Some(bytes) => format!("{} ({})", process.pid, Bytes(bytes)),
            None => format!("{} (n/a)", process.pid),
        })
        .collect();
    let more = match others.len().saturating_sub(MAX_PROCESSES) {
        0 => String::new(),
        n_more => format!(", and {n_more} more"),
    };
    let sentence = match others.len() {
        0 => return None,
        1 => format!("1 process uses device {}: {}.", device.index, names[0]),
        n => format!("{n} processes use device {}: {}{more}.", device.index, names.join(", ")),
    };
    Some(Finding::new(Topic::Devices, Level::Note, sentence))
}

/// What `CUDA_VISIBLE_DEVICES` does, and whether the numbers can be relied on.
fn selection(sample: &Sample, visible: &Visible, variable: Option<&str>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_blind = visible.devices.is_empty() && !sample.devices.is_empty();
    if let (Some(ended), Some(text)) = (&visible.ended, variable) {
        // To end the list with a negative number, or to hide everything, is how it is done on purpose.
        let is_meant = matches!(ended, Ended::Empty | Ended::Negative(_));
        let level = match (is_meant, is_blind) {
            (true, false) => Level::Note,
            (true, true) | (false, false) => Level::Warning,
            (false, true) => Level::Problem,
        };
        let what = if text.trim().is_empty() {
            "CUDA_VISIBLE_DEVICES".to_owned()
        } else {
            format!("CUDA_VISIBLE_DEVICES={text}")
        };
        let finding = Finding::new(Topic::Devices, level, format!("{what}: {ended}."));
        findings.push(if level == Level::Note {
            finding
        } else {
            finding.hint(
                "unset it to see all devices, or list numbers or identifiers from above, separated by commas",
            )
        });
    }
    if !visible.is_order_certain && visible.devices.len() + usize::from(variable.is_some()) > 1 {
        let sentence = "The devices are of different models, and CUDA numbers the fastest first: its numbers may differ \
                        from those of nvidia-smi and from the ones above.";
        let finding = Finding::new(Topic::Devices, Level::Warning, sentence);
        findings.push(finding.hint("set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by their identifiers"));
    }
    findings
}

/// What the driver does not say about processes.
fn accounting(sample: &Sample) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_secret = sample.devices.iter().any(|device| device.processes.is_none());
    let mut processes = sample.devices.iter().flat_map(|device| device.processes.iter().flatten()).peekable();
    let has_processes = processes.peek().is_some();
    if is_secret {
        let sentence = "The driver does not say which processes use a device.";
        findings.push(Finding::new(Topic::Devices, Level::Note, sentence));
    } else if has_processes && processes.all(|process| process.used_bytes.is_none()) {
        let sentence = "The driver does not say how much memory each process holds.";
        findings.push(Finding::new(Topic::Devices, Level::Note, sentence));
    }
    if has_processes && sample.has_foreign_pids == Some(true) {
        let sentence = "The ids of the processes are the host's, which mean other processes in here.";
        let finding = Finding::new(Topic::Devices, Level::Note, sentence);
        findings.push(
            finding.hint("start the container with the host's process ids (`--pid=host`) to compare them"),
        );
    }
    findings
}
