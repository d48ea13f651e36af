//! The `unhand` command: arguments in, an answer on stdout, an exit code out.
//!
//! This crate is the only one that opens files, knows a terminal and prints. What it prints is computed
//! and worded in `unhand-analyze`; each command has one file here, named like the command.

mod advice;
mod arguments;
mod diff;
mod doctor;
mod dry_run;
mod exec;
mod explain;
mod export;
mod failure;
mod flame;
mod load;
mod open;
mod out_of_memory;
mod output;
mod parallel;
mod printer;
mod progress;
mod replay;
mod run;
mod settings;
mod stand_in;
mod table;

/// Compiles the Rust in README.md.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

use std::ffi::OsString;
use std::path::Path;

use clap::Parser;

use crate::arguments::{Arguments, Command};
use crate::failure::{Failure, Outcome};
use crate::printer::Printer;

pub use crate::out_of_memory::out_of_memory;

/// Runs the command line `arguments`, program name first, and gives the exit code: 0 fine, 1 found what
/// was asked for, 2 bad use, 3 bad input.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    run_in(None, arguments)
}

/// As [`run`], inside a program of the Python interpreter `python`.
pub fn run_in(python: Option<&Path>, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version go to stdout, misuse to stderr. If nobody listens, nobody is told.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let mut printer = Printer::stdout(arguments.shared.color);
    let outcome = perform(&arguments, python, &mut printer).and_then(|outcome| {
        printer.finish()?;
        Ok(outcome)
    });
    match outcome {
        Ok(outcome) => outcome.exit_code(),
        Err(failure) => {
            // What was printed before the failure belongs before its message.
            let _ = printer.finish();
            failure.report(arguments.shared.color);
            failure.exit_code()
        }
    }
}

/// What `unhand run` on this command line asks for, as JSON, for the Python package that does it. `None` for any other
/// command line, help and misuse included: those are [`run_in`]'s.
pub fn run_plan(arguments: impl IntoIterator<Item = OsString>) -> Option<String> {
    match Arguments::try_parse_from(arguments).ok()?.command {
        Command::Run(run) => run.plan().ok(),
        _ => None,
    }
}

fn perform(arguments: &Arguments, python: Option<&Path>, printer: &mut Printer) -> Result<Outcome, Failure> {
    let shared = arguments.shared;
    match &arguments.command {
        Command::Explain(explain) => explain::run(explain, shared, printer),
        Command::Replay(replay) => replay::run(replay, shared, printer),
        Command::Diff(diff) => diff::run(diff, shared, printer),
        Command::Flame(flame) => flame::run(flame, shared, printer),
        Command::Export(export) => export::run(export, shared, printer),
        Command::Run(run) => run::run(run, python),
        Command::Doctor(doctor) => doctor::run(doctor, python, shared, printer),
        Command::DryRun(dry_run) => dry_run::run(dry_run, python, shared, printer),
        Command::StandIn(stand_in) => stand_in::run(stand_in, python, printer),
    }
}
