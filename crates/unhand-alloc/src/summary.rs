//! `memory_summary()`: the statistics as a table, in PyTorch's layout and units.
//!
//! Source: `torch/cuda/memory.py::memory_summary`: the rows of one metric share a unit in each column, chosen so
//! that the total stays below 768 Ki of it (750,000 for counts), and division truncates.

use std::fmt::Write as _;

use crate::stats::{DeviceStats, Stat};

const WIDTH: usize = 75;

/// Renders the table; `abbreviated` leaves the rows per pool out.
pub(crate) fn summary(device: usize, stats: &DeviceStats, abbreviated: bool) -> String {
    let rule = |fill: char| format!("|{}|\n", fill.to_string().repeat(WIDTH));
    let mut text = rule('=');
    let _ = writeln!(text, "| {:16} PyTorch CUDA memory summary, device ID {device:<17} |", "");
    text += &rule('-');
    let (ooms, retries) = (stats.num_ooms, stats.num_alloc_retries);
    let _ =
        writeln!(text, "|  {:9} CUDA OOMs: {ooms:<12} | {:6} cudaMalloc retries: {retries:<8}  |", "", "");
    text += &rule('=');
    text += "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n";
    let map = stats.to_map();
    let stat = |key: &str, scope: &str| {
        let field = |name: &str| map.get(&format!("{key}.{scope}.{name}")).copied().unwrap_or(0);
        Stat {
            current: field("current"),
            peak: field("peak"),
            allocated: field("allocated"),
            freed: field("freed"),
        }
    };
    let rows = [
        ("allocated_bytes", "Allocated memory", true),
        ("active_bytes", "Active memory", true),
        ("requested_bytes", "Requested memory", true),
        ("reserved_bytes", "GPU reserved memory", true),
        ("inactive_split_bytes", "Non-releasable memory", true),
        ("allocation", "Allocations", false),
        ("active", "Active allocs", false),
        ("segment", "GPU reserved segments", false),
        ("inactive_split", "Non-releasable allocs", false),
    ];
    for (key, title, is_bytes) in rows {
        text += &rule('-');
        let all = stat(key, "all");
        text += &row(title, all, all, is_bytes);
        if !abbreviated {
            text += &row("      from large pool", stat(key, "large_pool"), all, is_bytes);
            text += &row("      from small pool", stat(key, "small_pool"), all, is_bytes);
        }
    }
    for (title, stat) in [
        ("Oversize allocations", stats.oversize_allocations),
        ("Oversize GPU segments", stats.oversize_segments),
    ] {
        text += &rule('-');
        text += &row(title, stat, stat, false);
    }
    text + &rule('=')
}

/// One row; the units are those that suit `all`.
fn row(title: &str, stat: Stat, all: Stat, is_bytes: bool) -> String {
    let mut text = format!("| {title:<21} ");
    for (value, preferred) in [
        (stat.current, all.current),
        (stat.peak, all.peak),
        (stat.allocated, all.allocated),
        (stat.freed, all.freed),
    ] {
        let cell = if is_bytes { bytes(value, preferred) } else { count(value, preferred) };
        let _ = write!(text, "| {cell} ");
    }
    text + "|\n"
}

fn bytes(value: i64, preferred: i64) -> String {
    let units = ["B  ", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (value, unit) = scale(value, preferred, &units, 768 * 1024, 1024);
    format!("{value:>6} {unit}")
}

fn count(value: i64, preferred: i64) -> String {
    let (value, unit) = scale(value, preferred, &[" ", "K", "M"], 750_000, 1000);
    format!("{value:>7} {unit} ")
}

fn scale<'a>(mut value: i64, mut preferred: i64, units: &[&'a str], limit: i64, step: i64) -> (i64, &'a str) {
    let mut unit = units[0];
    for next in &units[1..] {
        if preferred < limit {
            break;
        }
        unit = next;
        value /= step;
        preferred /= step;
    }
    (value, unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CachingAllocator, NullDevice, Request};

    #[test]
    fn units_switch_where_pytorch_switches() {
        assert_eq!(bytes(768 * 1024 - 1, 768 * 1024 - 1), "786431 B  ");
        assert_eq!(bytes(768 * 1024, 768 * 1024), "   768 KiB");
        assert_eq!(count(750_000, 750_000), "    750 K ");
        assert_eq!(bytes(5 << 20, 2 << 40), "     0 GiB");
    }

    /// Compared with what torch 2.11 prints for the same statistics.
    #[test]
    fn the_table_has_pytorchs_layout() {
        let allocator = CachingAllocator::new(vec![NullDevice::new(1 << 40)]);
        let kept = allocator.malloc(0, Request::new(3 << 30)).expect("memory");
        let freed = allocator.malloc(0, Request::new(100)).expect("memory");
        allocator.free(0, freed).expect("live");
        let text = allocator.memory_summary(0, false).expect("exists");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|line| line.len() == 77), "{text}");
        assert_eq!(lines.len(), 47);
        let expected = [
            (1, "|                  PyTorch CUDA memory summary, device ID 0                 |"),
            (3, "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |"),
            (5, "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |"),
            (7, "| Allocated memory      |   3072 MiB |   3072 MiB |   3072 MiB |    512 B   |"),
            (8, "|       from large pool |   3072 MiB |   3072 MiB |   3072 MiB |      0 B   |"),
            (9, "|       from small pool |      0 MiB |      0 MiB |      0 MiB |    512 B   |"),
            (27, "| Allocations           |       1    |       2    |       2    |       1    |"),
        ];
        for (at, line) in expected {
            assert_eq!(lines[at], line, "{text}");
        }
        let short = allocator.memory_summary(0, true).expect("exists");
        assert_eq!(short.lines().count(), 29);
        allocator.free(0, kept).expect("live");
    }
}
