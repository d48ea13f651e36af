//! Runs a command on the stand-in: `standin-run [--torch FOLDER] [--check] -- python script.py …`.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use unhand_standin::{core_library, find, inspect, plan, prepare};

const USAGE: &str = "usage: standin-run [--torch FOLDER] [--check] [--] PROGRAM [ARGUMENT]...

  --torch FOLDER  the folder of the module `torch`; by default the one that PROGRAM, a Python, would import
  --check         only say which functions PyTorch needs that the stand-in does not have

The GPU is chosen with environment variables, UNHAND_STANDIN_GPU=l4 for example.";

struct Arguments {
    torch: Option<PathBuf>,
    checks_only: bool,
    command: Vec<String>,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        say(USAGE);
        return ExitCode::from(2);
    };
    match run(&arguments) {
        Ok(code) => code,
        Err(message) => {
            say(&format!("error: {message}"));
            ExitCode::from(3)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut arguments = Arguments { torch: None, checks_only: false, command: Vec::new() };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--torch" => arguments.torch = Some(words.next()?.into()),
            "--check" => arguments.checks_only = true,
            "--" => {
                arguments.command.extend(words);
                break;
            }
            _ if word.starts_with('-') => return None,
            _ => {
                arguments.command.push(word);
                arguments.command.extend(words);
                break;
            }
        }
    }
    (!arguments.command.is_empty() || arguments.torch.is_some() && arguments.checks_only).then_some(arguments)
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let folder = match &arguments.torch {
        Some(folder) => folder.clone(),
        None => find(arguments.command.first().ok_or("no command")?)?,
    };
    let torch = inspect(&folder)?;
    let plan = plan(&torch, &core_library()?)?;
    if arguments.checks_only {
        for name in &plan.missing {
            say(name);
        }
        let n_needed = torch.functions.len();
        say(&format!("torch {}: {n_needed} functions needed, {} missing", torch.version, plan.missing.len()));
        return Ok(ExitCode::from(u8::from(!plan.missing.is_empty())));
    }
    let prepared = prepare(&plan, &cache())?;
    let (program, rest) = arguments.command.split_first().ok_or("no command")?;
    let mut command = Command::new(program);
    command.args(rest).envs(prepared.environment);
    // Takes the place of this process, so that signals and exit codes need no passing on.
    Err(format!("cannot run `{program}`: {}", command.exec()).into())
}

/// Where the libraries are kept.
fn cache() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("unhand/standin")
}

/// One line to stderr: stdout belongs to the program.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
