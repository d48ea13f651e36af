//! What a dry run says: the figures at the peak with how sure they are, who held it, and where it fits.

use serde::Serialize;
use unhand_analyze::replay::{Program, Run, WhatIf, merge_conf, sweep};
use unhand_analyze::{Advice, Holding, SCHEMA_VERSION};
use unhand_snapshot::Snapshot;
use unhand_standin::{PROFILES, Profile};

use super::program::Ran;
use crate::explain::explain_device;
use crate::failure::Failure;
use crate::load::Loaded;
use crate::parallel::map_in_order;

/// The GPU a dry run is about.
pub(super) struct Target {
    pub(super) profile: &'static Profile,
    /// Its memory, which may be another than the profile's.
    pub(super) memory_bytes: u64,
    /// Whether it was named; otherwise the run is about all GPUs.
    pub(super) is_asked: bool,
}

impl Target {
    /// The profile's name without the note that it is not there.
    pub(super) fn device_name(&self) -> &'static str {
        self.profile.device_name.trim_end_matches(" (unhand stand-in)")
    }
}

/// The answer. The field names are the JSON names.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    pub(super) schema_version: u32,
    /// The PyTorch that ran; `null` if the program did not import it.
    pub(super) torch: Option<String>,
    /// The program's.
    pub(super) exit_code: u8,
    /// Optimizer steps that were made; `null` if the process ended too early to tell.
    pub(super) steps: Option<u64>,
    /// Whether `--max-steps` ended the program.
    pub(super) stopped: bool,
    /// Those whose memory was used.
    pub(super) devices: Vec<Device>,
    pub(super) notes: Vec<String>,
}

/// One device of the run.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) device: usize,
    pub(super) name: String,
    /// The most there was, each at its own moment.
    pub(super) peak: Ladder,
    pub(super) confidence: Confidence,
    /// Who held what at the peak of requested bytes.
    pub(super) at_peak: Option<Holding>,
    /// On the GPU that was asked about.
    pub(super) fit: Fit,
    /// On every GPU that is known, largest first.
    pub(super) gpus: Vec<Fit>,
    /// Settings that would need less.
    pub(super) advice: Vec<Advice>,
}

/// The figures of the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Ladder {
    pub(super) requested_bytes: u64,
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
    /// Context and whatever else is taken from the device beside PyTorch's allocator.
    pub(super) context_bytes: u64,
    pub(super) used_bytes: u64,
}

/// How sure each figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sureness {
    /// What the same program asks for on a device.
    Exact,
    /// That, and what a library asks for that only a device tells.
    AtLeast,
    /// Read off a device of this kind once.
    Measured,
    /// Worked out from another kind of device.
    Guess,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Confidence {
    pub(super) requested: Sureness,
    pub(super) allocated: Sureness,
    pub(super) reserved: Sureness,
    pub(super) context: Sureness,
    pub(super) used: Sureness,
    /// Libraries whose workspaces are not in the figures.
    pub(super) without_workspaces_of: Vec<&'static str>,
}

/// Whether the run fits a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Fit {
    pub(super) gpu: &'static str,
    pub(super) memory_bytes: u64,
    pub(super) context_bytes: u64,
    /// With the settings of the run.
    pub(super) fits: bool,
    /// Whether it fits only because the allocator gives cached memory back when there is no more, which takes time.
    pub(super) gives_back: bool,
    /// Settings with which it fits, where it does not without.
    pub(super) fits_with: Option<String>,
    /// What is left at the peak, if it fits.
    pub(super) left_bytes: Option<u64>,
    /// What the blocks alone are too large by; `null` if it fits, or would without gaps.
    pub(super) lacking_bytes: Option<u64>,
}

/// Libraries by how their calls begin, where they ask for memory that the stand-in does not know.
const LIBRARIES: &[(&str, &str)] =
    &[("cudnn", "cuDNN"), ("cufft", "cuFFT"), ("cusolver", "cuSOLVER"), ("cusparse", "cuSPARSE")];

impl Answer {
    pub(super) fn of(ran: &Ran, target: &Target) -> Result<Answer, Failure> {
        let mut answer = Answer {
            schema_version: SCHEMA_VERSION,
            torch: ran.facts.as_ref().and_then(|facts| facts.torch.clone()),
            exit_code: ran.exit_code,
            steps: ran.facts.as_ref().map(|facts| facts.steps),
            stopped: ran.facts.as_ref().is_some_and(|facts| facts.stopped),
            devices: Vec::new(),
            notes: notes(ran),
        };
        let (Some(snapshot), Some(facts)) = (ran.snapshot()?, &ran.facts) else { return Ok(answer) };
        let loaded = Loaded { name: "the recorded run".into(), snapshot };
        for device in &facts.devices {
            let unanswered = |error| Failure::unanswered(&loaded.name, &error);
            let program = Program::of(&loaded.snapshot, device.device).map_err(unanswered)?;
            let recorded = program.recorded().map_err(unanswered)?;
            if !recorded.same_as_recorded {
                answer.notes.push(format!(
                    "The replay of cuda:{} does not repeat the run exactly, so where it fits is approximate.",
                    device.device
                ));
            }
            // What other libraries took beside the context is the same on every GPU.
            let extra_bytes = device.outside_bytes.saturating_sub(target.profile.context_bytes);
            let fit_of = |profile: &'static Profile, memory_bytes| {
                fit(&program, &recorded, profile.name, memory_bytes, profile.context_bytes + extra_bytes)
            };
            let explanation = explain_device(&loaded, device.device, false, true)?;
            let peak = recorded.peak;
            let context_bytes = target.profile.context_bytes + extra_bytes;
            answer.devices.push(Device {
                device: device.device,
                name: device.name.clone(),
                peak: Ladder {
                    requested_bytes: peak.requested_bytes,
                    allocated_bytes: peak.allocated_bytes,
                    reserved_bytes: peak.reserved_bytes,
                    context_bytes,
                    used_bytes: peak.reserved_bytes + context_bytes,
                },
                confidence: confidence(&ran.log, target.profile),
                at_peak: explanation.at_peak,
                fit: fit_of(target.profile, target.memory_bytes)?,
                gpus: map_in_order(PROFILES, |profile| fit_of(profile, profile.memory_bytes))?,
                advice: explanation.advice,
            });
        }
        Ok(answer)
    }

    /// Whether it fits the GPU that was asked about, on every device it used.
    pub(super) fn fits(&self) -> bool {
        self.devices.iter().all(|device| device.fit.fits)
    }
}

fn notes(ran: &Ran) -> Vec<String> {
    let mut notes = Vec::new();
    if ran.facts.as_ref().is_none_or(|facts| facts.devices.is_empty()) {
        notes.push(format!("There is nothing to say about memory: {}.", ran.without_history()));
    }
    if ran.exit_code != 0 {
        notes.push(format!(
            "The program failed with exit code {}; the figures are those until then.",
            ran.exit_code
        ));
    }
    notes
}

fn confidence(log: &str, profile: &Profile) -> Confidence {
    let calls: Vec<&str> = log.lines().filter_map(|line| line.strip_prefix("call ")).collect();
    let is_called = |start: &str| calls.iter().any(|call| call.starts_with(start));
    let without_workspaces_of: Vec<&str> =
        LIBRARIES.iter().filter(|(start, _)| is_called(start)).map(|(_, name)| *name).collect();
    let blocks = if without_workspaces_of.is_empty() { Sureness::Exact } else { Sureness::AtLeast };
    let context = if profile.is_measured { Sureness::Measured } else { Sureness::Guess };
    let used = if blocks == Sureness::AtLeast { blocks } else { context };
    Confidence {
        requested: blocks,
        allocated: blocks,
        reserved: blocks,
        context,
        used,
        without_workspaces_of,
    }
}

fn fit(
    program: &Program,
    recorded: &Run,
    gpu: &'static str,
    memory_bytes: u64,
    context_bytes: u64,
) -> Result<Fit, Failure> {
    let limit = memory_bytes.saturating_sub(context_bytes);
    let mut fit = Fit {
        gpu,
        memory_bytes,
        context_bytes,
        fits: true,
        gives_back: false,
        fits_with: None,
        left_bytes: None,
        lacking_bytes: None,
    };
    let peak = recorded.peak;
    if peak.reserved_bytes <= limit {
        fit.left_bytes = Some(limit - peak.reserved_bytes);
        return Ok(fit);
    }
    // The allocator gives back what it caches before it gives up, so less than the recorded reservation may do.
    let under = |change: &str| {
        let what_if =
            WhatIf { conf: merge_conf(program.conf(), change), memory_bytes: Some(limit), release: None };
        program.under(&what_if).map_err(|error| Failure::unanswered("the recorded run", &error))
    };
    let is_fine = |run: &Run| run.ran_out.is_none() && run.ooms <= recorded.ooms;
    fit.lacking_bytes = peak.allocated_bytes.checked_sub(limit).filter(|bytes| *bytes > 0);
    if fit.lacking_bytes.is_some() {
        fit.fits = false;
        return Ok(fit);
    }
    let as_it_is = under("")?;
    if is_fine(&as_it_is) {
        fit.gives_back = true;
        fit.left_bytes = Some(limit.saturating_sub(as_it_is.peak.reserved_bytes));
        return Ok(fit);
    }
    fit.fits = false;
    for change in sweep(program.profile(), true) {
        if under(&change).is_ok_and(|run| is_fine(&run)) {
            fit.fits_with = Some(change);
            break;
        }
    }
    Ok(fit)
}

/// What one device of a run reserved at its peak, and whether that fits `limit_bytes`.
pub(super) fn need(snapshot: &Snapshot, device: usize, limit_bytes: u64) -> Result<(u64, bool), Failure> {
    let unanswered = |error| Failure::unanswered("the recorded run", &error);
    let program = Program::of(snapshot, device).map_err(unanswered)?;
    let recorded = program.recorded().map_err(unanswered)?;
    let fit = fit(&program, &recorded, "", limit_bytes, 0)?;
    Ok((recorded.peak.reserved_bytes, fit.fits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_exact_unless_a_library_asked_for_what_nobody_knows() {
        let l4 = Profile::named("l4").expect("known");
        let plain = confidence("kernel vectorized_elementwise_kernel\ncall cublasSgemm_v2\n", l4);
        assert_eq!(
            (plain.allocated, plain.context, plain.used),
            (Sureness::Exact, Sureness::Guess, Sureness::Guess)
        );
        let conv = confidence("call cudnnBackendExecute\n", PROFILES[0]);
        assert_eq!((conv.reserved, conv.context), (Sureness::AtLeast, Sureness::Measured));
        assert_eq!(conv.without_workspaces_of, ["cuDNN"]);
    }
}
