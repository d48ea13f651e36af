//! The largest value of an option with which a script fits: a search by running it, steered by how its peak grows.

use std::ffi::OsString;
use std::str::FromStr;

use serde::Serialize;
use unhand_analyze::{Bytes, SCHEMA_VERSION, plural};

use super::answer::{Target, need};
use super::program::{Output, Program, Ran};
use super::say;
use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::printer::Printer;

/// `batch_size=8..512`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    name: String,
    low: u64,
    high: u64,
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let form = || "the form is NAME=LO..HI, for example batch_size=8..512".to_owned();
        let (name, values) = text.split_once('=').ok_or_else(form)?;
        let (low, high) = values.split_once("..").ok_or_else(form)?;
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| form());
        let (low, high) = (number(low)?, number(high)?);
        let name = name.trim().trim_start_matches('-').to_owned();
        if name.is_empty() || low > high {
            return Err(form());
        }
        Ok(Range { name, low, high })
    }
}

/// One run of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Probe {
    value: u64,
    /// Of the device that reserved most.
    reserved_bytes: u64,
    fits: bool,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    schema_version: u32,
    gpu: &'static str,
    memory_bytes: u64,
    name: &'a str,
    /// The largest value that fits; `null` if the lowest does not.
    largest: Option<u64>,
    /// In the order in which they were run.
    runs: &'a [Probe],
}

pub(super) fn run(
    program: &Program,
    environment: &[(OsString, OsString)],
    range: &Range,
    target: &Target,
    max_steps: Option<u64>,
    shared: Shared,
    printer: &mut Printer,
) -> Result<Outcome, Failure> {
    say(
        shared,
        &format!(
            "unhand dry-run: the largest {} from {} to {} that fits {}, {}; nothing is computed",
            range.name,
            range.low,
            range.high,
            target.device_name(),
            Bytes(target.memory_bytes)
        ),
    );
    let probe = |value: u64| {
        let ran = program.run(environment, &[(&range.name, value)], max_steps, Output::Hidden)?;
        let probe = judged(&ran, value, &range.name, target)?;
        let verdict = if probe.fits { "fits" } else { "does not fit" };
        say(
            shared,
            &format!("  {}={value}: reserves {}, {verdict}", range.name, Bytes(probe.reserved_bytes)),
        );
        Ok(probe)
    };
    let limit = target.memory_bytes.saturating_sub(target.profile.context_bytes);
    let (largest, runs) = search(range, limit, probe)?;
    if shared.json {
        printer.json(&Answer {
            schema_version: SCHEMA_VERSION,
            gpu: target.profile.name,
            memory_bytes: target.memory_bytes,
            name: &range.name,
            largest,
            runs: &runs,
        })?;
    } else {
        let of = format!("{}, {}", target.device_name(), Bytes(target.memory_bytes));
        let n_runs = plural(runs.len() as u64, "run");
        match largest {
            Some(value) if value == range.high => writeln!(
                printer,
                "{}={value} fits {of}, the largest that was asked for ({n_runs})",
                range.name
            )?,
            Some(value) => {
                writeln!(printer, "{}={value} is the largest that fits {of} ({n_runs})", range.name)?
            }
            None => writeln!(printer, "{}={} does not fit {of}", range.name, range.low)?,
        }
    }
    Ok(if largest.is_some() { Outcome::Fine } else { Outcome::Found })
}

fn judged(ran: &Ran, value: u64, name: &str, target: &Target) -> Result<Probe, Failure> {
    if ran.exit_code != 0 {
        // An exception's own line may have others behind it.
        let is_exception = |line: &&str| {
            let name = line.split(':').next().unwrap_or_default();
            line.contains(": ") && (name.ends_with("Error") || name.ends_with("Exception"))
        };
        let mut lines = ran.stderr.trim().lines();
        let last = ran.stderr.lines().rfind(is_exception).or_else(|| lines.next_back());
        let last = last.unwrap_or("it says nothing").to_owned();
        return Err(Failure::bad_input(format!(
            "the script fails with {name}={value}, with exit code {}",
            ran.exit_code
        ))
        .because_text(&last)
        .hint("run it without --bisect to see what it prints"));
    }
    let nothing = || {
        Failure::bad_input(format!("nothing is known about {name}={value}"))
            .because_text(ran.without_history())
    };
    let (Some(snapshot), Some(facts)) = (ran.snapshot()?, &ran.facts) else { return Err(nothing()) };
    let mut probe = Probe { value, reserved_bytes: 0, fits: true };
    for device in &facts.devices {
        let outside_bytes = device.outside_bytes.max(target.profile.context_bytes);
        let limit = target.memory_bytes.saturating_sub(outside_bytes);
        let (reserved_bytes, fits) = need(&snapshot, device.device, limit)?;
        probe.reserved_bytes = probe.reserved_bytes.max(reserved_bytes);
        probe.fits &= fits;
    }
    if facts.devices.is_empty() { Err(nothing()) } else { Ok(probe) }
}

/// A run is at most so many times as large as the largest that is known to fit: a wrong guess must not take all day.
const STRIDE: u64 = 4;

/// Finds the largest value whose probe fits, if what does not fit stays so for larger values.
///
/// Memory mostly grows by the same amount with each unit, so the line through two probes says where it meets the limit.
/// A guess that does not halve what is left to search is followed by the middle, so that nothing takes long.
fn search(
    range: &Range,
    limit_bytes: u64,
    mut probe: impl FnMut(u64) -> Result<Probe, Failure>,
) -> Result<(Option<u64>, Vec<Probe>), Failure> {
    let first = probe(range.low)?;
    let mut runs = vec![first];
    if !first.fits {
        return Ok((None, runs));
    }
    // The largest that is known to fit, and the smallest that does not, if there is one.
    let (mut below, mut above) = (first, None::<Probe>);
    let mut is_middle_due = false;
    loop {
        let beyond = above.map_or(range.high.saturating_add(1), |above| above.value);
        let left = beyond - below.value;
        if left <= 1 {
            return Ok((Some(below.value), runs));
        }
        let guess = match above {
            Some(_) if is_middle_due => below.value + left / 2,
            Some(above) => meets(below, above, limit_bytes).unwrap_or(below.value + left / 2),
            // Twice is near enough to be quick, and far enough to tell how memory grows.
            None if runs.len() == 1 => first.value.saturating_mul(2),
            None => {
                let farthest = below.value.saturating_mul(STRIDE);
                meets(first, below, limit_bytes).map_or(farthest, |value| value.min(farthest))
            }
        };
        let was_a_guess = above.is_some() && !is_middle_due;
        let run = probe(guess.clamp(below.value + 1, beyond - 1))?;
        runs.push(run);
        if run.fits {
            below = run;
        } else {
            above = Some(run);
        }
        let now_left = above.map_or(0, |above| above.value - below.value);
        is_middle_due = was_a_guess && now_left > left / 2;
    }
}

/// The last value below the limit on the line through two probes.
fn meets(a: Probe, b: Probe, limit_bytes: u64) -> Option<u64> {
    let rise = u128::from(b.reserved_bytes.checked_sub(a.reserved_bytes).filter(|rise| *rise > 0)?);
    let room = u128::from(limit_bytes.saturating_sub(a.reserved_bytes));
    let steps = room * u128::from(b.value - a.value) / rise;
    a.value.checked_add(u64::try_from(steps).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// The largest of `low..high` for a script that reserves `need(value)`, and how often it was run.
    fn found(low: u64, high: u64, need: impl Fn(u64) -> u64) -> (Option<u64>, usize) {
        let range = Range { name: "batch".into(), low, high };
        let probe = |value| {
            let reserved_bytes = need(value);
            Ok(Probe { value, reserved_bytes, fits: reserved_bytes <= 24 * GIB })
        };
        let (largest, runs) = search(&range, 24 * GIB, probe).expect("no script fails");
        (largest, runs.len())
    }

    #[test]
    fn finds_the_largest_in_few_runs() {
        let line = |value: u64| GIB + value * GIB / 10;
        let (largest, n_runs) = found(8, 512, line);
        assert!(largest == Some(230) && n_runs <= 5, "{largest:?} in {n_runs}");
        // In steps, as an allocator reserves; and a curve, as attention makes it.
        let steps = |value: u64| (GIB + value * GIB / 10).next_multiple_of(GIB / 2);
        let (largest, n_runs) = found(1, 4096, steps);
        assert!(largest == Some(230) && n_runs <= 8, "{largest:?} in {n_runs}");
        let curve = |value: u64| GIB + value * value * GIB / 1000;
        let (largest, n_runs) = found(1, 100_000, curve);
        assert!(largest == Some(151) && n_runs <= 20, "{largest:?} in {n_runs}");
    }

    #[test]
    fn the_ends_of_the_range_are_answers_too() {
        assert_eq!(found(8, 512, |_| 25 * GIB), (None, 1));
        assert_eq!(found(8, 8, |_| GIB), (Some(8), 1));
        let (largest, n_runs) = found(8, 512, |value| GIB + value);
        assert!(largest == Some(512) && n_runs <= 5, "{largest:?} in {n_runs}");
        // Nothing grows: the middle is all that is left.
        let (largest, n_runs) = found(1, 1024, |value| if value < 700 { GIB } else { 30 * GIB });
        assert!(largest == Some(699) && n_runs <= 22, "{largest:?} in {n_runs}");
    }

    #[test]
    fn reads_a_range_or_says_its_form() {
        let range = Range { name: "batch_size".into(), low: 8, high: 512 };
        assert_eq!("batch_size=8..512".parse(), Ok(range.clone()));
        assert_eq!("--batch_size=8..512".parse(), Ok(range));
        for text in ["batch_size", "batch_size=8", "=1..2", "batch_size=9..8", "batch_size=a..b"] {
            assert!(text.parse::<Range>().is_err(), "{text}");
        }
    }
}
