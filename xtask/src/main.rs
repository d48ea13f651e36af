//! `cargo xtask`: the house rules (`check`) and the whole test run (`test`), with no tool but Rust.

mod finding;
mod instructions;
mod module;
mod order;
mod prose;
mod rules;
mod runner;
mod tree;

use std::io::Write;
use std::process::ExitCode;

/// Whatever went wrong, already in words: an xtask has one reader, the person at the terminal.
type Failure = Box<dyn std::error::Error>;

const USAGE: &str = "usage: cargo xtask <command>

  check         house rules: crate order, unsafe, file headers and lengths, forbidden words, docs
  test          everything CI runs: format, lints, house rules, tests, Python, reference, oracle, instructions
  lint          the part of `test` that runs no test
  standin       the real PyTorch on the stand-in; installs PyTorch first (1.1 GB to download)
  module        build the module of the Python package and put it into the checkout; --release for speed
  instructions  count the instructions of the allocator's hot loops";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["check"] => check(),
        ["test"] => runner::run(runner::Scope::Everything),
        ["instructions"] => instructions::run(),
        ["module"] => module::place(false),
        ["module", "--release"] => module::place(true),
        ["standin"] => runner::run(runner::Scope::Standin),
        ["lint"] => runner::run(runner::Scope::Lint),
        _ => {
            say(USAGE);
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            say(&format!("error: {failure}"));
            ExitCode::from(3)
        }
    }
}

/// Runs every house rule and prints what it found; true if there was nothing to say.
fn check() -> Result<bool, Failure> {
    let tree = tree::Tree::read()?;
    let mut findings = rules::check(&tree);
    findings.extend(prose::check(&tree));
    findings.extend(order::check(&tree)?);
    findings.sort();
    for finding in &findings {
        say(&finding.to_string());
    }
    let n_files = tree.files.len();
    match findings.len() {
        0 => say(&format!("house rules: {n_files} files, nothing to say")),
        n_findings => say(&format!("house rules: {n_files} files, {n_findings} findings")),
    }
    Ok(findings.is_empty())
}

/// One line to stdout. A closed pipe is no reason to panic: the exit code still says how it went.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
