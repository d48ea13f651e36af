//! Counts the instructions of the allocator's hot loops and compares them with what they may take.
//!
//! Instructions and not time: a count is the same on a busy machine, and a change of a few percent shows.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tree::root;
use crate::{Failure, say};

/// One loop of `benches/alloc`, and the instructions that one turn of it may take.
struct Loop {
    name: &'static str,
    arguments: &'static [&'static str],
    limit: u64,
}

/// The limits are about a tenth above what was measured when they were set. A change that needs more raises
/// its limit, with the reason in the commit; one that needs less lowers it.
const LOOPS: &[Loop] = &[
    Loop { name: "allocate and free 4 KiB", arguments: &["pair", "4096"], limit: 480 },
    Loop { name: "allocate and free 4 KiB by address", arguments: &["pair-by-address", "4096"], limit: 500 },
    Loop { name: "replace one of 20,000 blocks", arguments: &["replace", "20000"], limit: 1370 },
];

/// Each loop runs this often and twice as often; the difference leaves the start of the program out.
const TURNS: u64 = 20_000;

/// Builds the loops and counts them under valgrind; true if every one is within its limit.
pub(crate) fn run() -> Result<bool, Failure> {
    let program = build()?;
    let mut is_fine = true;
    say(&format!("{:<36} {:>8} {:>8}", "instructions a turn", "now", "limit"));
    for Loop { name, arguments, limit } in LOOPS {
        let once = count(&program, arguments, TURNS)?;
        let twice = count(&program, arguments, 2 * TURNS)?;
        let per_turn = twice.saturating_sub(once) / TURNS;
        let verdict = if per_turn > *limit { "  too many" } else { "" };
        say(&format!("{name:<36} {per_turn:>8} {limit:>8}{verdict}"));
        is_fine &= per_turn <= *limit;
    }
    Ok(is_fine)
}

/// The benchmark is a workspace of its own, so its build goes beside ours and not into it.
fn build() -> Result<PathBuf, Failure> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let target = target.join("benches");
    let manifest = root().join("benches/alloc/Cargo.toml");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet", "--locked", "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(&target)
        .status()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    if !status.success() {
        return Err(format!("cannot build `{}`", manifest.display()).into());
    }
    Ok(target.join("release/alloc-bench"))
}

fn count(program: &Path, arguments: &[&str], turns: u64) -> Result<u64, Failure> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(arguments)
        .arg(turns.to_string())
        .output()
        .map_err(|error| format!("cannot run valgrind: {error}"))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("`{}` failed under valgrind: {report}", arguments.join(" ")).into());
    }
    collected(&report).ok_or_else(|| format!("valgrind did not say how much it collected: {report}").into())
}

/// The figure in callgrind's closing line: `==2079== Collected : 26101509`.
fn collected(report: &str) -> Option<u64> {
    report.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_count_of_callgrind() {
        assert_eq!(collected("==1== \n==1== Collected : 26101509\n==1== \n"), Some(26_101_509));
        assert_eq!(collected("==1== Command: alloc-bench\n"), None);
    }
}
