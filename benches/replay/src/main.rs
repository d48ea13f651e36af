//! Times the replay of recorded histories: `replay-bench FILE…` prints events per second for each snapshot.
//!
//! Files may be compressed. Reading a file is not part of the time; making the program is a column of its own.

use std::hint::black_box;

use unhand_analyze::replay::Program;
use unhand_snapshot::{ReadOptions, Snapshot};

type Failure = Box<dyn std::error::Error>;

/// Time this thread has spent on a processor: what else the machine does counts less than with a clock.
fn cpu_seconds() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split_whitespace().next().ok_or("no CPU time")?.parse()?;
    Ok(nanoseconds / 1e9)
}

/// Seconds for one run, the best of five. The kernel counts in milliseconds, so short runs are repeated.
fn best(times: usize, mut run: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = cpu_seconds()?;
        for _ in 0..times {
            run()?;
        }
        best = best.min((cpu_seconds()? - start) / times as f64);
    }
    Ok(best)
}

fn main() -> Result<(), Failure> {
    println!("best of five, million events per CPU second");
    println!("{:<32} {:>10} {:>8} {:>8} {:>12}", "", "events", "program", "replay", "is the same");
    for file in std::env::args().skip(1) {
        let bytes = std::fs::read(&file)?;
        let bytes = unhand_snapshot::decompress(&bytes)?;
        let snapshot = Snapshot::read(&bytes, &ReadOptions::default())?;
        let program = Program::of(&snapshot, 0)?;
        let run = program.recorded()?;
        let events = snapshot.traces.first().map_or(0, |trace| trace.len());
        let times = 3_000_000 / events.max(1) + 1;
        let making = best(times, || black_box(Program::of(&snapshot, 0)).map(|_| ()).map_err(Into::into))?;
        let running = best(times, || black_box(program.recorded()).map(|_| ()).map_err(Into::into))?;
        let rate = |seconds: f64| events as f64 / seconds / 1e6;
        let name = std::path::Path::new(&file).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (making, running) = (rate(making), rate(running));
        println!("{name:<32} {events:>10} {making:>8.1} {running:>8.1} {:>12}", run.same_as_recorded);
    }
    Ok(())
}
