//! `unhand replay`: what the same run would have reserved under other allocator settings.

mod text;

use std::path::{Path, PathBuf};

use clap::Args;
use unhand_alloc::{Profile, Release};
use unhand_analyze::replay::{Program, Replay, Run, WhatIf, merge_conf, sweep};
use unhand_analyze::{Bytes, SCHEMA_VERSION};

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::load::{Loaded, load};
use crate::open;
use crate::parallel::map_in_order;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::settings::{self, Setting};

const AFTER_HELP: &str = "\
Examples:
  unhand replay snapshot.pickle --set expandable_segments=True
  unhand replay snapshot.pickle --set max_split_size_mb=64 --set garbage_collection_threshold=0.8
  unhand replay snapshot.pickle --sweep                 a dozen common settings, best first
  unhand replay snapshot.pickle --memory 24GiB          would it have fitted a smaller GPU?

The first run is always the recorded one, and says whether the replay repeats it exactly.";

/// Replay the recorded run through PyTorch's allocation rules, as it was and under other settings
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Snapshots, folders of snapshots, or `-` for stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// A setting to try, as in `PYTORCH_CUDA_ALLOC_CONF`; several are tried together
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Setting>,

    /// Try a dozen common settings, each in a run of its own
    #[arg(long)]
    sweep: bool,

    /// The memory of the device, e.g. `24GiB`; without it memory never runs out
    #[arg(long, value_name = "BYTES")]
    memory: Option<Bytes>,

    /// Follow the rules of this PyTorch release instead of the one the recording shows
    #[arg(long, value_name = "2.N")]
    torch: Option<Release>,

    /// Replay this device only
    #[arg(long, value_name = "INDEX")]
    device: Option<usize>,
}

pub(crate) fn run(arguments: &Arguments, shared: Shared, printer: &mut Printer) -> Result<Outcome, Failure> {
    let paths = open::expand(&arguments.files)?;
    let replays = map_in_order(&paths, |path| replay_file(path, arguments, shared))?.concat();
    if shared.json {
        let runs = replays.into_iter().flat_map(|replay| replay.runs).collect();
        printer.json(&Replay { schema_version: SCHEMA_VERSION, runs })?;
        return Ok(Outcome::Fine);
    }
    for (index, replay) in replays.iter().enumerate() {
        if index > 0 {
            writeln!(printer)?;
        }
        text::print(replay, arguments.sweep, printer)?;
    }
    Ok(Outcome::Fine)
}

/// The runs of one device of one file, the recorded one first.
#[derive(Clone)]
struct DeviceReplay {
    name: String,
    device: usize,
    /// The release whose rules the recorded run follows.
    release: Release,
    runs: Vec<Run>,
    /// What the other runs had in common beside their settings.
    memory: Option<Bytes>,
    torch: Option<Release>,
}

fn replay_file(path: &Path, arguments: &Arguments, shared: Shared) -> Result<Vec<DeviceReplay>, Failure> {
    let loaded = load(path, shared)?;
    let devices = match arguments.device {
        Some(device) => vec![device],
        None => recorded_devices(&loaded),
    };
    devices.into_iter().map(|device| replay_device(&loaded, device, arguments)).collect()
}

/// The devices with a history; the first one if there is none, whose error then says so.
fn recorded_devices(loaded: &Loaded) -> Vec<usize> {
    let has_history =
        |device: &usize| loaded.snapshot.traces.get(*device).is_some_and(|trace| !trace.is_empty());
    let devices: Vec<usize> =
        unhand_analyze::devices(&loaded.snapshot).into_iter().filter(has_history).collect();
    if devices.is_empty() { vec![loaded.first_device()] } else { devices }
}

fn replay_device(loaded: &Loaded, device: usize, arguments: &Arguments) -> Result<DeviceReplay, Failure> {
    let name = &loaded.name;
    let failed = |error| Failure::unanswered(name, &error);
    let _progress = Progress::start(format!("replaying {name}"));
    let program = Program::of(&loaded.snapshot, device).map_err(failed)?;
    let mut recorded = program.recorded().map_err(failed)?;
    recorded.file = Some(name.clone());

    let what_ifs = what_ifs(&program, arguments)?;
    let mut runs = map_in_order(&what_ifs, |what_if| {
        let mut run = program.under(what_if).map_err(failed)?;
        run.file = Some(name.clone());
        Ok(run)
    })?;
    if arguments.sweep {
        runs.sort_by_key(|run| (run.ooms, run.peak.reserved_bytes, run.driver_calls.total()));
    }
    runs.insert(0, recorded);
    let release = program.profile().release;
    let (memory, torch) = (arguments.memory, arguments.torch);
    Ok(DeviceReplay { name: name.clone(), device, release, runs, memory, torch })
}

/// What to try, from the options: the settings given, a sweep over them, or only another device or release.
fn what_ifs(program: &Program, arguments: &Arguments) -> Result<Vec<WhatIf>, Failure> {
    let profile = arguments.torch.map_or(*program.profile(), Profile::of);
    let conf = settings::conf(&arguments.set, &profile)?;
    let what_if =
        |conf| WhatIf { conf, memory_bytes: arguments.memory.map(|Bytes(n)| n), release: arguments.torch };
    let mut what_ifs = Vec::new();
    let is_changed = !conf.is_empty() || arguments.memory.is_some() || arguments.torch.is_some();
    if is_changed {
        what_ifs.push(what_if(conf.clone()));
    }
    if arguments.sweep {
        let has_limit = arguments.memory.is_some() || program.limit_bytes().is_some();
        what_ifs.extend(sweep(&profile, has_limit).iter().map(|change| what_if(merge_conf(&conf, change))));
    }
    Ok(what_ifs)
}

/// The run that reserves least at its peak, if it reserves less than the recorded one and fails nowhere where
/// that did not. Of settings that save about the same, the simplest.
pub(crate) fn best_of<'a>(recorded: &Run, others: &'a [Run]) -> Option<&'a Run> {
    let fits =
        |run: &&Run| run.ooms <= recorded.ooms && run.ran_out.is_none_or(|ran_out| ran_out.as_recorded);
    let least = others.iter().filter(fits).map(|run| run.peak.reserved_bytes).min()?;
    let about_least = least + least / 100;
    let best = others
        .iter()
        .filter(fits)
        .filter(|run| run.peak.reserved_bytes <= about_least)
        .min_by_key(|run| (run.settings.len(), run.peak.reserved_bytes))?;
    (best.peak.reserved_bytes < recorded.peak.reserved_bytes).then_some(best)
}
