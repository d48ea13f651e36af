//! `unhand doctor`: what this machine allows PyTorch to do with its GPUs, and what to do about the rest.

mod devices;
mod driver;
mod environment;
mod finding;
mod interpreter;
#[cfg(test)]
mod tests;
mod text;
mod torch;
mod variables;

use std::path::{Path, PathBuf};

use clap::Args;
use unhand_analyze::SCHEMA_VERSION;

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::printer::Printer;
use crate::progress::Progress;
use environment::Environment;
use finding::{Diagnosis, Level};

const AFTER_HELP: &str = "\
Examples:
  unhand doctor
  unhand doctor --python .venv/bin/python     the interpreter that runs your programs
  CUDA_VISIBLE_DEVICES=1 unhand doctor        which device would be cuda:0?

Looks at the driver, the devices and who uses them, containers and WSL, PyTorch (found by
its files, never imported), and the variables that change what happens to memory. Makes no
CUDA context and takes no GPU memory.

Exit code 1 if there is a problem: PyTorch cannot use a GPU like this.";

/// Say what this machine allows PyTorch to do with its GPUs, and what to do about the rest
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// The Python interpreter to ask about PyTorch [default: the one unhand is installed for, or `python3`]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
}

/// `own_python` is the interpreter that runs the command, if one does.
pub(crate) fn run(
    arguments: &Arguments,
    own_python: Option<&Path>,
    shared: Shared,
    printer: &mut Printer,
) -> Result<Outcome, Failure> {
    let diagnosis = {
        let _progress = Progress::start("looking at this machine".to_owned());
        diagnose(&Environment::gather(interpreter::ask(arguments.python.as_deref(), own_python)))
    };
    if shared.json {
        printer.json(&diagnosis)?;
    } else {
        let text = text::render(&diagnosis, printer.style(), printer.width());
        write!(printer, "{text}")?;
    }
    Ok(if diagnosis.count(Level::Problem) > 0 { Outcome::Found } else { Outcome::Fine })
}

/// What to say about an environment. Looks at nothing else, so that every kind of machine can be tested on any.
fn diagnose(environment: &Environment) -> Diagnosis {
    let mut findings = driver::findings(environment);
    let (devices, of_devices) = devices::findings(environment);
    findings.extend(of_devices);
    findings.extend(torch::findings(environment));
    findings.extend(variables::findings(environment));
    findings.sort_by_key(|finding| finding.topic);
    let sample = environment.driver.as_ref().ok();
    Diagnosis {
        schema_version: SCHEMA_VERSION,
        findings,
        driver_version: sample.and_then(|sample| sample.driver_version.clone()),
        cuda_driver_version: sample.and_then(|sample| sample.cuda_driver_version.clone()),
        devices,
        python: environment.python.as_ref().ok().cloned(),
    }
}
