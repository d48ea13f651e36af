//! `unhand stand-in`: runs a command with the real PyTorch on a GPU that is not there.

pub(crate) mod interpreter;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use unhand_analyze::Bytes;
use unhand_standin::{Error, PROFILES, Profile, config};

use crate::exec;
use crate::failure::{Failure, Outcome};
use crate::printer::Printer;

const AFTER_HELP: &str = "\
Examples:
  unhand stand-in -- python train.py                  the real PyTorch, a GPU that is not there
  unhand stand-in --gpu l4 -- pytest tests            tests that need a GPU to allocate on
  unhand stand-in --memory 24GiB --devices 2 -- python
  unhand stand-in --check                             can PyTorch run on it here?

GPUs: h200, a100-80, h100-80, a100-40, rtx4090, l4, t4, rtx3060-12. What is allocated is what
would be allocated on a device. What is computed means nothing: kernels do not run. The name
of the device says so: it ends with `(unhand stand-in)`.

Needs a PyTorch built for CUDA, and Linux on x86-64. Not needed: a GPU, a driver, NVIDIA's
packages.";

/// Run a command with the real PyTorch on a GPU that is not there
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    #[command(flatten)]
    machine: Machine,

    /// Only say whether the stand-in has every function that PyTorch needs
    #[arg(long)]
    check: bool,

    /// The command, with its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "check",
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

/// Which machine is stood in for, and whose PyTorch runs on it.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Machine {
    /// The GPU to stand in for [default: h200]
    #[arg(long, value_name = "NAME", value_parser = profile_named)]
    pub(crate) gpu: Option<&'static Profile>,

    /// Its memory, instead of what that GPU has, e.g. `24GiB`
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Bytes>,

    /// How many GPUs there are [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) devices: Option<u8>,

    /// The folder of the module `torch` [default: what the command's Python would import]
    #[arg(long, value_name = "DIR")]
    pub(crate) torch: Option<PathBuf>,
}

fn profile_named(name: &str) -> Result<&'static Profile, String> {
    Profile::named(name).ok_or_else(|| format!("known are {}", names()))
}

/// The names of all GPUs, for messages.
pub(crate) fn names() -> String {
    PROFILES.iter().map(|profile| profile.name).collect::<Vec<_>>().join(", ")
}

/// `own_python` is the interpreter that runs us, if one does.
pub(crate) fn run(
    arguments: &Arguments,
    own_python: Option<&Path>,
    printer: &mut Printer,
) -> Result<Outcome, Failure> {
    let program = arguments.command.first().map_or(OsStr::new(""), OsString::as_os_str);
    let python = interpreter::of(program, own_python);
    if arguments.check {
        return check(&arguments.machine, &python, printer);
    }
    let environment = arguments.machine.environment(&python)?;
    let mut command = Command::new(program);
    command.args(&arguments.command[1..]).envs(environment);
    printer.finish()?;
    let error = exec::replace(&mut command);
    Err(Failure::bad_use(format!("cannot run `{}`", program.display())).because(&error))
}

fn check(machine: &Machine, python: &OsStr, printer: &mut Printer) -> Result<Outcome, Failure> {
    let torch = machine.torch(python)?;
    let plan = unhand_standin::plan(&torch).map_err(|error| refusal(&error))?;
    for name in &plan.missing {
        writeln!(printer, "missing: {name}")?;
    }
    let n_needed = torch.functions.len();
    writeln!(
        printer,
        "torch {}: {n_needed} functions needed, {} missing",
        torch.version,
        plan.missing.len()
    )?;
    Ok(if plan.missing.is_empty() { Outcome::Fine } else { Outcome::Found })
}

impl Machine {
    /// Variables with which a command that uses this Python runs on the stand-in.
    pub(crate) fn environment(&self, python: &OsStr) -> Result<Vec<(OsString, OsString)>, Failure> {
        let torch = self.torch(python)?;
        let prepared = unhand_standin::plan(&torch)
            .and_then(|plan| unhand_standin::prepare(&plan, &cache()))
            .map_err(|error| refusal(&error))?;
        let mut environment: Vec<(OsString, OsString)> =
            prepared.environment.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        environment.extend(self.gpu.map(|gpu| (config::GPU.into(), gpu.name.into())));
        environment.extend(self.memory.map(|Bytes(n)| (config::MEMORY.into(), n.to_string().into())));
        environment.extend(self.devices.map(|n| (config::DEVICES.into(), n.to_string().into())));
        if !interpreter::loads(python, &prepared.folder, &environment) {
            let what = format!("`{}` does not load the stand-in", python.display());
            return Err(Failure::bad_input(what).hint(
                "LD_PRELOAD has no effect on programs that are linked statically or run with more rights than you; \
                 use another Python, for example that of a virtual environment",
            ));
        }
        Ok(environment)
    }

    fn torch(&self, python: &OsStr) -> Result<unhand_standin::Torch, Failure> {
        let torch = match &self.torch {
            Some(folder) => unhand_standin::inspect(folder),
            None => unhand_standin::find(&python.to_string_lossy())
                .and_then(|folder| unhand_standin::inspect(&folder)),
        };
        torch.map_err(|error| refusal(&error))
    }
}

/// Why nothing runs on the stand-in here, and what would help.
fn refusal(error: &Error) -> Failure {
    let failure = Failure::bad_input("the stand-in cannot be used here").because(error);
    match error {
        Error::Platform => failure.hint("use Linux on x86-64, in a container for example; no GPU is needed"),
        Error::NotCuda(_) => failure.hint(
            "install PyTorch's wheel for CUDA; neither a GPU nor NVIDIA's packages are needed: `pip install \
             --no-deps torch` beside what is there",
        ),
        Error::NoTorch(_) | Error::Python { .. } => failure.hint(
            "name the interpreter that has PyTorch (`unhand stand-in -- .venv/bin/python …`), or the folder of \
             the module `torch` with --torch",
        ),
        Error::Path(_) => failure.hint("set XDG_CACHE_HOME to a folder without them"),
        Error::Missing(_) => failure.hint("this release of PyTorch is newer than this unhand"),
        _ => failure,
    }
}

/// Where the libraries are kept.
fn cache() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("unhand/standin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_every_gpu() {
        assert!(AFTER_HELP.replace('\n', " ").contains(&names()), "{}", names());
    }

    #[test]
    fn each_refusal_says_what_would_help() {
        let python = Error::Python { python: "python3".into(), message: "it has no module `torch`".into() };
        let errors = [
            Error::Platform,
            Error::NotCuda("2.11.0+cpu".into()),
            python,
            Error::Path("a b".into()),
            Error::Missing(vec!["cudaNew".into()]),
        ];
        for error in errors {
            let failure = refusal(&error);
            assert_eq!(failure.exit_code(), 3);
            assert!(format!("{failure:?}").contains("hint: Some"), "{failure:?}");
        }
    }
}
