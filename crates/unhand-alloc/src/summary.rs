//! `memory_summary()`: the statistics as a table, in PyTorch's layout and units.
//!
//! Source: `torch/cuda/memory.py::memory_summary`: a column of numbers shares one unit, chosen so that the peak
//! stays below 768 Ki of it, and division truncates.

use std::fmt::Write as _;

use crate::stats::{DeviceStats, Stat};

const WIDTH: usize = 75;

/// Renders the table; `abbreviated` leaves the rows per pool out.
pub(crate) fn summary(device: usize, stats: &DeviceStats, abbreviated: bool) -> String {
    let rule = |fill: char| format!("|{}|\n", fill.to_string().repeat(WIDTH));
    let mut text = rule('=');
    let _ = writeln!(text, "|{:^WIDTH$}|", format!("PyTorch CUDA memory summary, device ID {device}"));
    text += &rule('-');
    let retries = format!("cudaMalloc retries: {}", stats.num_alloc_retries);
    let _ = writeln!(text, "|{:^37}|{retries:^37}|", format!("CUDA OOMs: {}", stats.num_ooms));
    text += &rule('=');
    let columns = ["Metric", "Cur Usage", "Peak Usage", "Tot Alloc", "Tot Freed"];
    let _ = write!(text, "|{:^22}", columns[0]);
    for column in &columns[1..] {
        let _ = write!(text, "|{column:^12}");
    }
    text += "|\n";
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
        text += &row(title, stat(key, "all"), is_bytes);
        if !abbreviated {
            text += &row("    from large pool", stat(key, "large_pool"), is_bytes);
            text += &row("    from small pool", stat(key, "small_pool"), is_bytes);
        }
    }
    for (title, stat) in [
        ("Oversize allocations", stats.oversize_allocations),
        ("Oversize GPU segments", stats.oversize_segments),
    ] {
        text += &rule('-');
        text += &row(title, stat, false);
    }
    text + &rule('=')
}

fn row(title: &str, stat: Stat, is_bytes: bool) -> String {
    let mut text = format!("| {title:<21}");
    for value in [stat.current, stat.peak, stat.allocated, stat.freed] {
        let cell = if is_bytes { bytes(value, value) } else { count(value, value) };
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

    #[test]
    fn units_switch_where_pytorch_switches() {
        assert_eq!(bytes(768 * 1024 - 1, 768 * 1024 - 1), "786431 B  ");
        assert_eq!(bytes(768 * 1024, 768 * 1024), "   768 KiB");
        assert_eq!(count(750_000, 750_000), "    750 K ");
    }
}
