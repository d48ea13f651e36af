//! Which of several snapshots is different, and how: by totals, by the lines that hold memory, by the shapes of data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use unhand_alloc::Bytes;

use super::{RankRow, outliers};
use crate::category::Category;
use crate::explain::Explanation;
use crate::holding::Holding;

/// How many lines are named.
const MAX_HOLDERS: usize = 3;
/// How many tensors are named.
const MAX_INPUTS: usize = 3;
/// Two snapshots are told apart from this share of the larger one on, in percent.
const PAIR_PERCENT: u64 = 5;
/// And from so many bytes on.
const PAIR_BYTES: u64 = 64 << 20;

/// What is known about a rank beside its snapshot; read from the `report.json` of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct RankFacts {
    /// The number of the rank.
    #[serde(default)]
    pub rank: Option<u64>,
    /// Tensors that look like data.
    #[serde(default)]
    pub inputs: Vec<InputShape>,
}

/// A tensor by name, and its shape.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct InputShape {
    /// The variable.
    pub name: String,
    /// The shape.
    pub shape: Vec<u64>,
}

/// The snapshot that differs most from the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Different {
    /// Index into [`super::Ranks::rows`].
    pub row: usize,
    /// The lines that hold more or less than those of the others, the largest difference first, at most three.
    pub holders: Vec<HolderDifference>,
    /// Data of another shape, at most three.
    pub inputs: Vec<InputDifference>,
    /// All that as a paragraph.
    pub sentence: String,
}

/// A line that holds more or less.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HolderDifference {
    /// The line.
    pub place: String,
    /// What its blocks are for.
    pub category: Option<Category>,
    /// Requested bytes of this row.
    pub value_bytes: u64,
    /// The median of the others.
    pub others_bytes: u64,
}

/// Data of another shape than that of the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InputDifference {
    /// The variable.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The shape that the others have.
    pub others: Vec<u64>,
}

impl Different {
    /// Finds the row, or `None` when they are alike or all different.
    pub(super) fn find(
        explanations: &[Explanation],
        rows: &[RankRow],
        facts: &[RankFacts],
    ) -> Option<Different> {
        // Lines can be compared only where all have them.
        let has_stacks = explanations.iter().all(|explanation| explanation.recording.has_stacks);
        let lines: Vec<BTreeMap<Line, u64>> = explanations.iter().filter(|_| has_stacks).map(lines).collect();
        let bytes = |line: &Line| -> Vec<(usize, u64)> {
            lines.iter().map(|of| of.get(line).copied().unwrap_or(0)).enumerate().collect()
        };
        let mut all: Vec<&Line> = lines.iter().flat_map(BTreeMap::keys).collect();
        all.sort_unstable();
        all.dedup();
        // By how many bytes each row stands out.
        let mut weights = vec![0u64; rows.len()];
        for (row, value, others) in all.iter().flat_map(|line| apart(&bytes(line))) {
            weights[row] = weights[row].saturating_add(value.abs_diff(others));
        }
        let totals: [fn(&RankRow) -> Option<u64>; 2] =
            [|row| row.peak_reserved_bytes, |row| Some(row.end_allocated_bytes)];
        for total in totals {
            let values: Vec<(usize, u64)> =
                rows.iter().enumerate().filter_map(|(i, row)| Some((i, total(row)?))).collect();
            for (row, value, others) in apart(&values) {
                weights[row] = weights[row].saturating_add(value.abs_diff(others));
            }
        }
        let heaviest = weights.iter().copied().max().filter(|&weight| weight > 0);
        let row = match heaviest {
            Some(weight) => {
                // Of two that differ by the same, the one that has more.
                let with = (0..rows.len()).filter(|&row| weights[row] == weight);
                with.max_by_key(|&row| rows[row].end_allocated_bytes)?
            }
            None => (0..rows.len()).find(|&row| !inputs(facts, row, rows.len()).is_empty())?,
        };
        let mut holders: Vec<HolderDifference> = all
            .iter()
            .filter_map(|line| {
                let (_, value_bytes, others_bytes) =
                    apart(&bytes(line)).into_iter().find(|&(at, ..)| at == row)?;
                Some(HolderDifference { place: line.0.clone(), category: line.1, value_bytes, others_bytes })
            })
            .collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.value_bytes.abs_diff(holder.others_bytes)));
        holders.truncate(MAX_HOLDERS);
        let mut different =
            Different { row, holders, inputs: inputs(facts, row, rows.len()), sentence: String::new() };
        different.sentence = different.say(rows, facts, has_stacks);
        Some(different)
    }

    fn say(&self, rows: &[RankRow], facts: &[RankFacts], has_stacks: bool) -> String {
        let name = |row: usize| match facts.get(row).and_then(|facts| facts.rank) {
            Some(rank) => format!("rank {rank}"),
            None => rows[row].name(),
        };
        let is_pair = rows.len() == 2;
        let others = if is_pair { name(1 - self.row) } else { "the others".to_owned() };
        // What this row has, and the median of the others.
        let compared = |figure: fn(&RankRow) -> u64| {
            let theirs = rows.iter().enumerate().filter(|(row, _)| *row != self.row);
            let mut values: Vec<u64> = theirs.map(|(_, row)| figure(row)).collect();
            values.sort_unstable();
            (figure(&rows[self.row]), values.get((values.len().max(1) - 1) / 2).copied().unwrap_or(0))
        };
        let (allocated, reserved) =
            (compared(|row| row.end_allocated_bytes), compared(|row| row.peak_reserved_bytes.unwrap_or(0)));
        let verb = if is_pair { "has" } else { "have" };
        let this = name(self.row);
        let mut parts = vec![if reserved.0.abs_diff(reserved.1) > allocated.0.abs_diff(allocated.1) {
            let (own, theirs) = (Bytes(reserved.0), Bytes(reserved.1));
            format!("{this} is different: it reserved {own} at most where {others} reserved {theirs}.")
        } else if allocated.0 == allocated.1 {
            format!("{this} is different, though it holds as much as {others}.")
        } else {
            let (own, theirs) = (Bytes(allocated.0), Bytes(allocated.1));
            format!("{this} is different: it has {own} allocated where {others} {verb} {theirs}.")
        }];
        if has_stacks && self.holders.is_empty() && self.inputs.is_empty() {
            parts.push("No line of its stands out: it is rather the layout of the memory that differs than what is in it.".to_owned());
        }
        for (index, holder) in self.holders.iter().enumerate() {
            let kind = holder.category.map(|category| format!(", {}", category.words())).unwrap_or_default();
            let lead = if index == 0 { "The difference is at" } else { "Then at" };
            parts.push(format!(
                "{lead} {}{kind}: {} instead of {}.",
                holder.place,
                Bytes(holder.value_bytes),
                Bytes(holder.others_bytes)
            ));
        }
        for input in &self.inputs {
            parts.push(format!(
                "Its `{}` is of shape {} where {others} {verb} {}.",
                input.name,
                shape(&input.shape),
                shape(&input.others)
            ));
        }
        if is_pair {
            parts.push("Two do not say which of them is wrong.".to_owned());
        }
        let sentence = parts.join(" ");
        let mut letters = sentence.chars();
        match letters.next() {
            // The name of a file stays as it is.
            Some(first) if sentence.starts_with("rank ") => first.to_uppercase().chain(letters).collect(),
            _ => sentence,
        }
    }
}

/// A line and what its blocks are for.
type Line = (String, Option<Category>);

/// The bytes that each line holds: where memory ran out at that moment, elsewhere at the peak.
fn lines(explanation: &Explanation) -> BTreeMap<Line, u64> {
    let end = &explanation.end.holding;
    let holding: &Holding =
        if explanation.ooms.is_empty() { explanation.at_peak.as_ref().unwrap_or(end) } else { end };
    let mut bytes = BTreeMap::new();
    for holder in &holding.holders {
        *bytes.entry((holder.site.place().to_owned(), holder.category)).or_insert(0) +=
            holder.requested_bytes;
    }
    bytes
}

/// The values that stand out, as (index, value, what the others have). Of two that differ both do.
fn apart(values: &[(usize, u64)]) -> Vec<(usize, u64, u64)> {
    match *values {
        [(a, x), (b, y)] => {
            let least = PAIR_BYTES.max(x.max(y) / 100 * PAIR_PERCENT);
            if x.abs_diff(y) > least { vec![(a, x, y), (b, y, x)] } else { Vec::new() }
        }
        _ => outliers(values),
    }
}

/// The data of a row that has another shape than that of all other rows.
fn inputs(facts: &[RankFacts], row: usize, n_rows: usize) -> Vec<InputDifference> {
    let Some(own) = facts.get(row).filter(|_| facts.len() == n_rows && n_rows > 1) else { return Vec::new() };
    let mut found = Vec::new();
    for input in &own.inputs {
        if found.len() == MAX_INPUTS {
            break;
        }
        let mut theirs =
            facts.iter().enumerate().filter(|(at, _)| *at != row).map(|(_, of)| {
                of.inputs.iter().find(|other| other.name == input.name).map(|other| &other.shape)
            });
        let Some(Some(first)) = theirs.next() else { continue };
        if *first != input.shape && theirs.all(|shape| shape == Some(first)) {
            found.push(InputDifference {
                name: input.name.clone(),
                shape: input.shape.clone(),
                others: first.clone(),
            });
        }
    }
    found
}

fn shape(shape: &[u64]) -> String {
    let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", sizes.join(", "))
}
