//! The whole test run: each step is one command a person could type, and every test is counted.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::tree::root;
use crate::{Failure, check, instructions, module, say};

/// How much to run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What needs no test to run: format, lints, house rules.
    Lint,
    /// What CI runs.
    Everything,
    /// The real PyTorch on the stand-in: apart, because it installs PyTorch first.
    Standin,
}

/// One step: a name for the summary and the commands behind it, in order.
struct Step {
    name: &'static str,
    commands: Vec<Vec<&'static str>>,
    environment: Vec<(&'static str, &'static str)>,
    /// Programs this step cannot do without, beside cargo.
    needs: &'static [&'static str],
}

/// How many tests passed and failed. A step without tests of its own counts as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
}

enum Outcome {
    Done { count: Count, took: Duration },
    Skipped { why: String },
}

/// Runs the steps, the later ones even if an earlier one failed, and closes with the counts.
pub(crate) fn run(scope: Scope) -> Result<bool, Failure> {
    let mut total = Count::default();
    let mut summary = Vec::new();
    for step in steps(scope) {
        let outcome = perform(&step)?;
        if let Outcome::Done { count, .. } = &outcome {
            total.passed += count.passed;
            total.failed += count.failed;
        }
        summary.push((step.name, outcome));
    }
    say("");
    for (name, outcome) in &summary {
        say(&format!("{name:<12} {outcome}"));
    }
    say(&format!("{} passed, {} failed", total.passed, total.failed));
    Ok(total.failed == 0)
}

fn steps(scope: Scope) -> Vec<Step> {
    let step = |name, commands: &[&[&'static str]]| Step {
        name,
        commands: commands.iter().map(|words| words.to_vec()).collect(),
        environment: Vec::new(),
        needs: &[],
    };
    if scope == Scope::Standin {
        return vec![
            Step {
                // Without the variable the tests pass where PyTorch has not been installed.
                environment: vec![("UNHAND_REQUIRE_STANDIN", "1")],
                needs: &["python3"],
                ..step(
                    "stand-in",
                    &[
                        &["python3", "tests/standin/fetch.py"],
                        &["cargo", "test", "-p", "unhand-standin", "--test", "torch", "--quiet"],
                    ],
                )
            },
            Step {
                needs: &["python3"],
                ..step(
                    "python",
                    &[
                        &["module"],
                        &["python3", "tests/python/run.py", "--torch", "2.11.0"],
                        // The slow ones have been run: here it is about what differs between releases.
                        &[
                            "python3",
                            "tests/python/run.py",
                            "--torch",
                            "2.15.0",
                            "see",
                            "ladder",
                            "actions",
                            "native",
                        ],
                    ],
                )
            },
        ];
    }
    let mut steps = vec![
        step("format", &[&["cargo", "fmt", "--all", "--check"]]),
        step(
            "lints",
            &[&["cargo", "clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]],
        ),
        step("house rules", &[&["check"]]),
    ];
    if scope == Scope::Lint {
        return steps;
    }
    steps.push(Step {
        // An inline snapshot that differs is a failed test, never a file to review later.
        environment: vec![("INSTA_UPDATE", "no")],
        ..step("tests", &[&["cargo", "test", "--workspace", "--no-fail-fast", "--quiet"]])
    });
    steps.push(Step {
        needs: &["python3"],
        ..step("python", &[&["module"], &["python3", "tests/python/run.py"]])
    });
    steps.push(Step {
        environment: vec![("RUSTDOCFLAGS", "-D warnings")],
        ..step("docs", &[&["cargo", "doc", "--workspace", "--no-deps", "--quiet"]])
    });
    steps.push(Step {
        // Without the variable the comparison is skipped where the oracle has not been built.
        environment: vec![("UNHAND_REQUIRE_ORACLE", "1")],
        needs: &["python3", "g++"],
        ..step(
            "oracle",
            &[
                &["python3", "tests/oracle/fetch.py"],
                &["python3", "tests/oracle/build.py"],
                &["python3", "tests/oracle/check.py"],
                &["cargo", "test", "--release", "-p", "unhand-alloc", "--test", "differential", "--quiet"],
            ],
        )
    });
    steps.push(Step { needs: &["valgrind"], ..step("instructions", &[&["instructions"]]) });
    steps
}

fn perform(step: &Step) -> Result<Outcome, Failure> {
    say(&format!("\n== {}", step.name));
    if let Some(missing) = step.needs.iter().find(|program| !is_installed(program)) {
        return Ok(Outcome::Skipped { why: format!("`{missing}` is not installed") });
    }
    let start = Instant::now();
    let mut count = Count::default();
    let mut is_fine = true;
    for words in &step.commands {
        is_fine = match words.as_slice() {
            ["check"] => check()?,
            ["instructions"] => instructions::run()?,
            ["module"] => module::place(false)?,
            words => execute(words, &step.environment, &mut count)?,
        };
        if !is_fine {
            break;
        }
    }
    // A step without tests, and a step that failed before or beside its tests, is one check itself.
    if !is_fine && count.failed == 0 {
        count.failed = 1;
    } else if is_fine && count == Count::default() {
        count.passed = 1;
    }
    Ok(Outcome::Done { count, took: start.elapsed() })
}

/// Runs one command in the repository root, passes its output on, and adds up its test results.
fn execute(words: &[&str], environment: &[(&str, &str)], count: &mut Count) -> Result<bool, Failure> {
    let (program, arguments) = words.split_first().ok_or("a step without a command")?;
    say(&format!("$ {}", words.join(" ")));
    let mut child = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(root())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot run `{program}`: {error}"))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if let Some(result) = result_of(&line) {
                count.passed += result.passed;
                count.failed += result.failed;
            }
            say(&line);
        }
    }
    Ok(child.wait()?.success())
}

/// The counts of a closing line: libtest's (`test result: ok. 3 passed; 0 failed; …`) or that of a Python script
/// (`3 passed, 0 failed`).
fn result_of(line: &str) -> Option<Count> {
    if let Some((passed, failed)) = line.split_once(" passed, ") {
        return Some(Count {
            passed: passed.parse().ok()?,
            failed: failed.strip_suffix(" failed")?.parse().ok()?,
        });
    }
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |word: &str| {
        let field = counts.split(';').find(|field| field.trim().ends_with(word))?;
        field.split_whitespace().next()?.parse().ok()
    };
    Some(Count { passed: number(" passed")?, failed: number(" failed")? })
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done { count: Count { passed, failed }, took } => {
                let seconds = took.as_secs_f64();
                write!(f, "{passed:>5} passed {failed:>3} failed {seconds:>7.1} s")
            }
            Outcome::Skipped { why } => write!(f, "skipped: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_closing_line_of_a_script() {
        assert_eq!(result_of("12 passed, 3 failed"), Some(Count { passed: 12, failed: 3 }));
        for line in ["FAILED check_passed, not failed", "x: 12 passed, 3 failed", "12 passed, 3 failed."] {
            assert_eq!(result_of(line), None, "{line}");
        }
    }

    #[test]
    fn reads_the_closing_line_of_a_test_binary() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(result_of(line), Some(Count { passed: 12, failed: 3 }));
        for line in ["test result: ok", "running 3 tests", "12 passed; 3 failed"] {
            assert_eq!(result_of(line), None, "{line}");
        }
    }

    #[test]
    fn linting_runs_no_test() {
        let runs_tests = |scope| steps(scope).iter().any(|step| step.commands.concat().contains(&"test"));
        assert!(!runs_tests(Scope::Lint));
        assert!(runs_tests(Scope::Everything));
    }
}
