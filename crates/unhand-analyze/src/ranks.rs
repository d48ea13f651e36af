//! Several snapshots side by side: one row each, and the odd one out.

mod different;

use std::fmt::Write;

use serde::Serialize;

use crate::explain::{Explanation, SCHEMA_VERSION, TextOptions};
use crate::prose::{Share, keep_end, wrap};
use unhand_alloc::Bytes;

pub use different::{Different, HolderDifference, InputDifference, InputShape, RankFacts};

/// Explanations of several files or devices, compared.
#[derive(Clone, Debug, Serialize)]
pub struct Ranks {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// One row for each explanation, in the order given.
    pub rows: Vec<RankRow>,
    /// Rows that differ from the others; empty when none does.
    pub odd: Vec<OddOne>,
    /// The row that differs most and what is different about it; `None` when none does.
    pub different: Option<Different>,
}

/// The figures of one explanation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankRow {
    /// The file.
    pub file: Option<String>,
    /// The device.
    pub device: usize,
    /// Peak of requested bytes; `None` without a history.
    pub peak_requested_bytes: Option<u64>,
    /// Peak of reserved bytes; `None` without a history.
    pub peak_reserved_bytes: Option<u64>,
    /// Bytes allocated at the end.
    pub end_allocated_bytes: u64,
    /// Bytes reserved at the end.
    pub end_reserved_bytes: u64,
    /// Bytes by which the leak suspects grow with each repetition.
    pub growth_bytes: u64,
    /// Out-of-memory errors.
    pub ooms: u64,
}

/// A row that differs from the median.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OddOne {
    /// Index into [`Ranks::rows`].
    pub row: usize,
    /// The figure, by its field name in [`RankRow`].
    pub figure: &'static str,
    /// Its value.
    pub value_bytes: u64,
    /// The median over all rows.
    pub median_bytes: u64,
    /// All that as a sentence.
    pub sentence: String,
}

impl Ranks {
    /// Compares explanations. With fewer than three there is no odd one out: two that differ do not say which
    /// of them is wrong.
    pub fn of(explanations: &[Explanation]) -> Ranks {
        Ranks::with_facts(explanations, &[])
    }

    /// As [`of`](Ranks::of), with what is known about each of them beside the snapshot, in the same order.
    pub fn with_facts(explanations: &[Explanation], facts: &[RankFacts]) -> Ranks {
        let rows: Vec<RankRow> = explanations.iter().map(RankRow::of).collect();
        let figures: [Figure; 4] = [
            ("peak_reserved_bytes", "reserved at most", |r| r.peak_reserved_bytes),
            ("peak_requested_bytes", "needed at most", |r| r.peak_requested_bytes),
            ("end_allocated_bytes", "still holds", |r| Some(r.end_allocated_bytes)),
            ("growth_bytes", "grows in every repetition by", |r| Some(r.growth_bytes)),
        ];
        let mut odd = Vec::new();
        for (figure, words, of) in figures {
            let values: Vec<(usize, u64)> =
                rows.iter().enumerate().filter_map(|(i, row)| Some((i, of(row)?))).collect();
            for (row, value_bytes, median_bytes) in outliers(&values) {
                let sentence = say(&rows[row], words, value_bytes, median_bytes);
                odd.push(OddOne { row, figure, value_bytes, median_bytes, sentence });
            }
        }
        let different = Different::find(explanations, &rows, facts);
        Ranks { schema_version: SCHEMA_VERSION, rows, odd, different }
    }

    /// Writes the rows and the odd ones as text.
    pub fn render(&self, options: &TextOptions) -> String {
        let mut out = String::new();
        let name_width = self.rows.iter().map(|r| r.name().chars().count()).max().unwrap_or(4);
        let name_width = name_width.min(options.width.saturating_sub(48)).max(12);
        let head = format!(
            "{:<name_width$}  {:>10}  {:>10}  {:>10}  {:>10}",
            "", "peak need", "peak res.", "end alloc.", "end res."
        );
        let _ = writeln!(out, "{}", options.style.faint(head));
        let or_unknown =
            |bytes: Option<u64>| bytes.map_or_else(|| "n/a".to_owned(), |b| Bytes(b).to_string());
        for row in &self.rows {
            let _ = writeln!(
                out,
                "{:<name_width$}  {:>10}  {:>10}  {:>10}  {:>10}",
                keep_end(&row.name(), name_width),
                or_unknown(row.peak_requested_bytes),
                or_unknown(row.peak_reserved_bytes),
                Bytes(row.end_allocated_bytes),
                Bytes(row.end_reserved_bytes)
            );
        }
        for odd in &self.odd {
            let _ = writeln!(out, "{}", options.style.warning(&odd.sentence));
        }
        if let Some(different) = &self.different {
            let text = wrap(&different.sentence, options.width.max(60), 0);
            let _ = writeln!(out, "\n{}", options.style.warning(text));
        }
        out
    }
}

impl RankRow {
    /// The figures of an explanation.
    pub fn of(explanation: &Explanation) -> RankRow {
        let peak = explanation.peak.as_ref();
        RankRow {
            file: explanation.file.clone(),
            device: explanation.device,
            peak_requested_bytes: peak.map(|p| p.requested.peak_bytes),
            peak_reserved_bytes: peak.map(|p| p.reserved.peak_bytes),
            end_allocated_bytes: explanation.end.allocated_bytes,
            end_reserved_bytes: explanation.end.reserved_bytes,
            growth_bytes: explanation.leaks.iter().flat_map(|l| &l.suspects).map(|s| s.growth_bytes).sum(),
            ooms: explanation.ooms.len() as u64,
        }
    }

    fn name(&self) -> String {
        match &self.file {
            Some(file) if self.device == 0 => file.clone(),
            Some(file) => format!("{file}, device {}", self.device),
            None => format!("device {}", self.device),
        }
    }
}

/// Field name, words for a sentence, and how to read it off a row.
type Figure = (&'static str, &'static str, fn(&RankRow) -> Option<u64>);

fn say(row: &RankRow, words: &str, value: u64, median: u64) -> String {
    let (more, by) = if value > median { ("more", value - median) } else { ("less", median - value) };
    let share = if median > 0 { format!(" ({} of it)", Share(by, median)) } else { String::new() };
    format!(
        "{} {words} {}: {} {more} than the median of {}{share}.",
        row.name(),
        Bytes(value),
        Bytes(by),
        Bytes(median)
    )
}

/// Values further from the median than 5 % of it, 64 MiB, and five times the median distance. The last keeps
/// ranks that all differ (pipeline stages) from being called odd.
fn outliers(values: &[(usize, u64)]) -> Vec<(usize, u64, u64)> {
    if values.len() < 3 {
        return Vec::new();
    }
    let median_of = |mut v: Vec<u64>| {
        v.sort_unstable();
        v[(v.len() - 1) / 2]
    };
    let median = median_of(values.iter().map(|&(_, v)| v).collect());
    let spread = median_of(values.iter().map(|&(_, v)| v.abs_diff(median)).collect());
    let tolerance = (median / 20).max(64 << 20).max(spread.saturating_mul(5));
    values
        .iter()
        .filter(|&&(_, v)| v.abs_diff(median) > tolerance)
        .map(|&(row, v)| (row, v, median))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn odd(values: &[u64]) -> Vec<usize> {
        let values: Vec<(usize, u64)> = values.iter().copied().enumerate().collect();
        outliers(&values).into_iter().map(|(row, ..)| row).collect()
    }

    #[test]
    fn names_the_one_that_differs() {
        let gib = 1 << 30;
        assert_eq!(odd(&[10 * gib, 10 * gib, 14 * gib, 10 * gib]), [2]);
        assert_eq!(odd(&[10 * gib, 10 * gib + (1 << 20), 10 * gib, 10 * gib]), [0; 0]);
    }

    #[test]
    fn says_nothing_when_all_differ_or_there_are_two() {
        let gib = 1 << 30;
        assert_eq!(odd(&[10 * gib, 12 * gib, 14 * gib, 16 * gib]), [0; 0]);
        assert_eq!(odd(&[10 * gib, 14 * gib]), [0; 0]);
    }
}
