//! Findings about Python and PyTorch: which release, built for which CUDA, and does the driver run it.

use std::collections::BTreeMap;

use unhand_alloc::Release;

use super::environment::Environment;
use super::finding::{Finding, Level, Topic};
use super::interpreter::{Interpreter, Torch};

/// The oldest Python that the package `unhand` runs on.
const OLDEST_PYTHON: (u32, u32) = (3, 10);

pub(super) fn findings(environment: &Environment) -> Vec<Finding> {
    let finding = |level, sentence: String| Finding::new(Topic::Python, level, sentence);
    let interpreter = match &environment.python {
        Ok(interpreter) => interpreter,
        Err(missing) => {
            let sentence = format!("Python does not answer: `{}`: {}.", missing.executable, missing.reason);
            return vec![
                finding(Level::Warning, sentence)
                    .hint("name the interpreter of your programs with `--python`"),
            ];
        }
    };
    let Interpreter { executable, version, torch, .. } = interpreter;
    let mut findings = Vec::new();
    if numbers(version).is_some_and(|version| version < OLDEST_PYTHON) {
        let sentence =
            format!("Python {version} ({executable}) is older than 3.10, which the package `unhand` needs.");
        findings.push(finding(Level::Warning, sentence));
    }
    if let Some(torch) = torch {
        findings.extend(of_torch(torch, interpreter, environment));
    } else {
        let sentence = format!("PyTorch is not installed for Python {version} ({executable}).");
        let hint = "name the interpreter of your programs with `--python`, or install PyTorch for this one";
        findings.push(finding(Level::Warning, sentence).hint(hint));
    }
    findings.extend(beside(&interpreter.packages));
    findings
}

/// The packages that unhand works with, and without.
fn beside(packages: &BTreeMap<String, Option<String>>) -> Option<Finding> {
    let found = packages.iter().filter_map(|(name, version)| Some(format!("{name} {}", version.as_deref()?)));
    let found: Vec<String> = found.collect();
    // The command runs without the package of its own name.
    let missing = packages.iter().filter(|(name, version)| version.is_none() && *name != "unhand");
    let missing: Vec<&str> = missing.map(|(name, _)| name.as_str()).collect();
    let (found, missing) = (found.join(", "), missing.join(", "));
    let sentence = match (found.as_str(), missing.as_str()) {
        ("", "") => return None,
        (_, "") => format!("Also installed: {found}."),
        ("", _) => format!("Not installed, and not needed: {missing}."),
        _ => format!("Also installed: {found}. Not installed, and not needed: {missing}."),
    };
    Some(Finding::new(Topic::Python, Level::Note, sentence))
}

fn of_torch(torch: &Torch, interpreter: &Interpreter, environment: &Environment) -> Vec<Finding> {
    let finding = |level, sentence: String| Finding::new(Topic::Python, level, sentence);
    let version = torch.version.as_deref().unwrap_or("of an unknown version");
    let place = format!("Python {}, {}", interpreter.version, interpreter.executable);
    let mut findings = Vec::new();
    match (&torch.cuda, &torch.hip) {
        (Some(cuda), _) => findings.push(of_cuda(version, cuda, &place, environment)),
        (None, Some(hip)) => {
            let sentence =
                format!("PyTorch {version} is built for ROCm {hip} ({place}); unhand looks at CUDA devices.");
            findings.push(finding(Level::Warning, sentence));
        }
        (None, None) => {
            let sentence = format!("PyTorch {version} is built without CUDA ({place}): it uses no GPU.");
            let hint = "install a build of PyTorch for CUDA; its version ends in `+cu` and a number";
            findings.push(finding(Level::Problem, sentence).hint(hint));
        }
    }
    if let Some(version) = &torch.version
        && version.parse::<Release>().is_err()
    {
        let (oldest, newest) = (Release::OLDEST, Release::NEWEST);
        let sentence = format!(
            "The rules of PyTorch {version} are not known: a replay follows those of {oldest} to {newest}."
        );
        findings.push(finding(Level::Warning, sentence));
    }
    findings
}

/// Whether the driver runs what PyTorch was built for. Within a major version it does, by CUDA's own promise.
fn of_cuda(version: &str, cuda: &str, place: &str, environment: &Environment) -> Finding {
    let driver = environment.driver.as_ref().ok().and_then(|sample| sample.cuda_driver_version.as_deref());
    let sentence = format!("PyTorch {version} is built for CUDA {cuda} ({place})");
    let finding = |level, rest: String| Finding::new(Topic::Python, level, format!("{sentence}{rest}"));
    let Some(driver) = driver else { return finding(Level::Ok, ".".to_owned()) };
    match (numbers(cuda), numbers(driver)) {
        (Some(built), Some(runs)) if built.0 > runs.0 => {
            let major = runs.0;
            finding(Level::Problem, format!("; the driver runs CUDA up to {driver} and will refuse it."))
                .hint(format!("update the driver, or install a build of PyTorch for CUDA {major}"))
        }
        (Some(built), Some(runs)) if built > runs => finding(
            Level::Note,
            format!("; the driver is older ({driver}) but of the same major version, which is enough."),
        ),
        _ => finding(Level::Ok, ", which the driver runs.".to_owned()),
    }
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
