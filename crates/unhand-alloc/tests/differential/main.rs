//! The allocator against the real one: random scripts are run on `unhand-alloc` and on PyTorch's own library
//! (`tests/oracle`), and compared after every operation: answers, all statistics, trace entries; at the end
//! every segment and block.
//!
//! Environment: `UNHAND_REQUIRE_ORACLE=1` makes a missing oracle a failure; `UNHAND_ORACLE_VERSIONS` names
//! releases (default: all that are built); `UNHAND_ORACLE_CASES` is the number of scripts for each release
//! (default 2000, without optimisation 200), `UNHAND_ORACLE_STEPS` their greatest length (default 150), `UNHAND_ORACLE_SEED` the seed
//! (default 0, `random` takes a new one). `UNHAND_ORACLE_AGAINST=2.14.1` compares with that release's library in
//! place of ours, to find where PyTorch itself changed.
#![expect(clippy::print_stderr, reason = "a test that is skipped has to say so")]

mod conf;
mod generate;
mod minimize;
mod oracle;
mod outcome;
mod script;
mod subject;

use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::env;
use std::fmt::Write as _;
use std::hash::{BuildHasher as _, Hasher as _};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use minimize::minimize;
use oracle::Oracle;
use outcome::{Outcome, Tally, first_difference};
use script::Script;
use subject::Ours;

/// Something that runs scripts and is compared with the oracle.
trait Subject {
    fn run(&mut self, script: &Script) -> Result<Outcome, String>;
}

impl Subject for Oracle {
    fn run(&mut self, script: &Script) -> Result<Outcome, String> {
        Oracle::run(self, script)
    }
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn cases() -> u32 {
    let default = if cfg!(debug_assertions) { 200 } else { 2000 };
    u32::try_from(number("UNHAND_ORACLE_CASES", default)).unwrap_or(u32::MAX)
}

fn seed() -> u64 {
    if env::var("UNHAND_ORACLE_SEED").is_ok_and(|text| text == "random") {
        return RandomState::new().build_hasher().finish();
    }
    number("UNHAND_ORACLE_SEED", 0)
}

/// The releases to test, or none with an explanation on the terminal.
fn versions() -> Vec<String> {
    let versions = oracle::versions();
    if versions.is_empty() {
        let help = "the oracle is not built: nothing was compared with PyTorch.\n\
                    To build it: tests/oracle/fetch.py && tests/oracle/build.py (about 6 MB, needs g++)";
        assert!(number("UNHAND_REQUIRE_ORACLE", 0) == 0, "{help}");
        eprintln!("SKIPPED: {help}");
    }
    versions
}

fn subject(version: &str) -> Box<dyn Subject> {
    match env::var("UNHAND_ORACLE_AGAINST") {
        Ok(other) => Box::new(start(&other)),
        Err(_) => Box::new(Ours::new(version)),
    }
}

fn start(version: &str) -> Oracle {
    Oracle::start(version)
        .unwrap_or_else(|error| panic!("the oracle of torch {version} does not start: {error}"))
}

/// Runs a script on both sides: what both did, or how they differ.
fn compare(oracle: &mut Oracle, subject: &mut dyn Subject, script: &Script) -> Result<Outcome, String> {
    let theirs = oracle.run(script)?;
    if theirs.refused {
        return Ok(theirs);
    }
    let ours = subject.run(script)?;
    first_difference(&script.lines, &theirs, &ours, script.unordered).map_or(Ok(theirs), Err)
}

/// Runs random scripts; the report of the smallest failing one.
fn random(
    version: &str,
    cases: u32,
    seed: u64,
    scripts: &impl Strategy<Value = Script>,
) -> Result<Tally, String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let theirs = RefCell::new(start(version));
    let ours = RefCell::new(subject(version));
    let tally = RefCell::new(Tally::default());
    let result = runner.run(scripts, |script| {
        let mut theirs = theirs.borrow_mut();
        match compare(&mut theirs, ours.borrow_mut().as_mut(), &script) {
            Ok(outcome) => {
                tally.borrow_mut().add(&outcome);
                Ok(())
            }
            Err(difference) => {
                // Whatever happened, the next script needs a process that listens.
                *theirs = start(version);
                Err(TestCaseError::fail(difference))
            }
        }
    });
    result.map(|()| *tally.borrow()).map_err(|error| match error {
        TestError::Fail(difference, script) => {
            // Lines fall away faster than proptest's steps would.
            let (script, difference) = minimize(script, difference.to_string(), |script| {
                let mut theirs = theirs.borrow_mut();
                let told = compare(&mut theirs, ours.borrow_mut().as_mut(), script).err();
                if told.is_some() {
                    *theirs = start(version);
                }
                told
            });
            format!("torch {version}, seed {seed}: {difference}\n{script}")
        }
        TestError::Abort(reason) => reason.to_string(),
    })
}

/// Joins what the threads of several releases found.
fn for_each_version(test: impl Fn(&str) -> Result<(), String> + Sync) {
    let versions = versions();
    let reports: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = versions.iter().map(|version| scope.spawn(|| test(version))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no panic").err()).collect()
    });
    assert!(reports.is_empty(), "\n{}", reports.join("\n\n"));
}

#[test]
fn random_scripts_have_the_same_outcome() {
    let cases = cases();
    let most = usize::try_from(number("UNHAND_ORACLE_STEPS", 150)).unwrap_or(150);
    let seed = seed();
    for_each_version(|version| {
        let tally = random(version, cases, seed, &generate::plan(most).prop_map(|plan| plan.script()))?;
        eprintln!("torch {version} agrees, seed {seed}: {tally}");
        Ok(())
    });
}

#[test]
fn random_settings_are_read_alike() {
    let cases = cases();
    let seed = seed();
    for_each_version(|version| {
        let tally = random(version, cases, seed, &conf::script())?;
        eprintln!("torch {version} reads the same settings, seed {seed}: {tally}");
        Ok(())
    });
}

#[test]
fn kept_scripts_have_the_same_outcome() {
    let folder = oracle::home().join("scripts");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .map(|entries| entries.filter_map(Result::ok).map(|entry| entry.path()).collect())
        .unwrap_or_default();
    files.retain(|path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "txt"));
    files.sort();
    for_each_version(|version| {
        let (mut theirs, mut ours) = (start(version), subject(version));
        let mut report = String::new();
        for path in &files {
            let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
            let script = Script::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            if let Err(difference) = compare(&mut theirs, ours.as_mut(), &script) {
                let _ = writeln!(report, "torch {version}, {}: {difference}", path.display());
            }
        }
        if report.is_empty() { Ok(()) } else { Err(report) }
    });
}
