//! `unhand replay`: what the same run would have reserved under other allocator settings.

use std::path::PathBuf;

use clap::Args;
use unhand_alloc::Release;
use unhand_analyze::Bytes;

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::printer::Printer;
use crate::settings::Setting;

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

pub(crate) fn run(_: &Arguments, _: Shared, _: &mut Printer) -> Result<Outcome, Failure> {
    Err(Failure::bad_use("`replay` is not part of this build"))
}
