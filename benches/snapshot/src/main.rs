//! Answers "who held the memory at the peak?" for one snapshot file and prints what that cost.

use std::collections::HashMap;
use std::error::Error;
use std::time::Instant;

use unhand_snapshot::{Action, ReadOptions, Snapshot, StackId};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: snapshot-bench FILE")?;
    let (start, cpu) = (Instant::now(), cpu_seconds()?);
    let file = std::fs::File::open(&path)?;
    // SAFETY: the file is not changed while this runs; it is a benchmark's own.
    let bytes = unsafe { memmap2::Mmap::map(&file)? };
    bytes.advise(memmap2::Advice::Sequential)?;
    let snapshot = Snapshot::read(&bytes, &ReadOptions::default())?;
    let (read_cpu, read_anon) = (cpu_seconds()? - cpu, status("RssAnon:")?);
    let (peak, mut by_stack) = peak_by_stack(&snapshot);
    let total_cpu = cpu_seconds()? - cpu;
    let n_events: usize = snapshot.traces.iter().map(|trace| trace.len()).sum();
    println!(
        "events {n_events}  trie nodes {}  read {read_cpu:.2} CPU-s  read + peak by stack {total_cpu:.2} CPU-s  wall {:.2} s",
        snapshot.stacks.len(),
        start.elapsed().as_secs_f64()
    );
    let file_mib = bytes.len() as f64 / f64::from(1 << 20);
    println!(
        "file {file_mib:.0} MiB  anonymous memory after reading {:.0} MiB  peak RSS beyond the file {:.0} MiB",
        read_anon / 1024.0,
        status("VmHWM:")? / 1024.0 - file_mib
    );
    by_stack.sort_by_key(|&(stack, bytes)| (std::cmp::Reverse(bytes), stack));
    println!("peak {:.3} GiB in {} stacks; the largest:", peak as f64 / f64::from(1 << 30), by_stack.len());
    for (stack, bytes) in by_stack.into_iter().take(3) {
        let frame = snapshot.stacks.innermost(stack).map(|id| snapshot.stacks.frame(id));
        let place = frame.map_or_else(String::new, |frame| {
            let get = |id| snapshot.strings.get(id);
            format!("{} {}:{}", get(frame.name), get(frame.filename), frame.line)
        });
        println!("  {:.1} MiB  {place}", bytes as f64 / f64::from(1 << 20));
    }
    Ok(())
}

/// The most bytes that were alive at once on the first device, and whose they were.
fn peak_by_stack(snapshot: &Snapshot) -> (u64, Vec<(StackId, u64)>) {
    let Some(trace) = snapshot.traces.first() else { return (0, Vec::new()) };
    let mut live: HashMap<u64, u64> = HashMap::new();
    let (mut now, mut peak, mut peak_at) = (0u64, 0, 0);
    for (index, event) in trace.iter().enumerate() {
        match event.action {
            Action::Alloc => {
                live.insert(event.addr, event.size);
                now += event.size;
            }
            Action::FreeRequested | Action::Free => now -= live.remove(&event.addr).unwrap_or(0),
            _ => {}
        }
        if now > peak {
            (peak, peak_at) = (now, index);
        }
    }
    let mut at_peak: HashMap<u64, (StackId, u64)> = HashMap::new();
    for event in trace.iter().take(peak_at + 1) {
        match event.action {
            Action::Alloc => drop(at_peak.insert(event.addr, (event.stack, event.size))),
            Action::FreeRequested | Action::Free => drop(at_peak.remove(&event.addr)),
            _ => {}
        }
    }
    let mut by_stack: HashMap<StackId, u64> = HashMap::new();
    for (stack, size) in at_peak.into_values() {
        *by_stack.entry(stack).or_default() += size;
    }
    (peak, by_stack.into_iter().collect())
}

/// User and system time of this process, from `/proc/self/stat` in ticks of 10 ms.
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

/// A line of `/proc/self/status`, in KiB.
fn status(key: &str) -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("no such line")?;
    Ok(line.split_whitespace().next().unwrap_or("0").parse()?)
}
