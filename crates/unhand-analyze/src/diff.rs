//! Answers `diff`: what grew, shrank, came and went between two snapshots.

mod text;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::category::Category;
use crate::explain::{Explanation, SCHEMA_VERSION};
use crate::holding::{Holder, Holding};
use crate::pins::PinGroup;
use crate::site::FrameText;
use unhand_alloc::BytesChange;

/// The differences between two explanations, `before` and `after`.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The file of the first.
    pub before: Option<String>,
    /// The file of the second.
    pub after: Option<String>,
    /// The device of the first.
    pub device_before: usize,
    /// The device of the second.
    pub device_after: usize,
    /// The totals, in the order peaks, end, cache.
    pub figures: Vec<FigureChange>,
    /// Holders at the peak of requested bytes; `None` unless both have a history.
    pub at_peak: Option<Vec<HolderChange>>,
    /// Holders at the end.
    pub at_end: Vec<HolderChange>,
    /// Settings that differ.
    pub settings: Vec<SettingChange>,
    /// Stuck segments by the lines that pin them.
    pub pinned_by: Vec<PinChange>,
    /// Leak suspects of one that the other has not.
    pub leaks: Vec<LeakChange>,
}

/// One total, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FigureChange {
    /// Which: `peak_requested_bytes`, `end_reserved_bytes`, …
    pub figure: &'static str,
    /// Before; `None` when it is not known.
    pub before: Option<u64>,
    /// After; `None` when it is not known.
    pub after: Option<u64>,
    /// The difference; `None` unless both are known.
    pub change: Option<i64>,
    /// Whether it counts bytes; otherwise things.
    pub is_bytes: bool,
}

/// One holder, before and after. A holder that is missing on one side has 0 there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HolderChange {
    /// The line.
    pub site: String,
    /// Where that line was before, when it moved within the same function.
    pub moved_from: Option<String>,
    /// The whole path of the file.
    pub file: Option<String>,
    /// What the blocks are for; `None` without stacks.
    pub category: Option<Category>,
    /// How it changed.
    pub kind: ChangeKind,
    /// Requested bytes before.
    pub before_bytes: u64,
    /// Requested bytes after.
    pub after_bytes: u64,
    /// The difference.
    pub change_bytes: BytesChange,
    /// Blocks before.
    pub before_blocks: u64,
    /// Blocks after.
    pub after_blocks: u64,
    /// The same by stack, largest change first; empty unless both explanations list stacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<StackChange>,
}

/// One stack of a holder, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StackChange {
    /// Requested bytes before.
    pub before_bytes: u64,
    /// Requested bytes after.
    pub after_bytes: u64,
    /// The frames, innermost first.
    pub frames: Vec<FrameText>,
}

/// How something changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// It was not there before.
    Appeared,
    /// It is not there any more.
    Disappeared,
    /// It is larger.
    Grew,
    /// It is smaller.
    Shrank,
}

/// One allocator setting, before and after; `None` where it is not set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SettingChange {
    /// The key in `PYTORCH_CUDA_ALLOC_CONF`.
    pub key: String,
    /// Before.
    pub before: Option<String>,
    /// After.
    pub after: Option<String>,
}

/// Stuck bytes beside the blocks of some lines, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PinChange {
    /// The lines.
    pub sites: Vec<String>,
    /// Segments before.
    pub before_segments: u64,
    /// Segments after.
    pub after_segments: u64,
    /// Stuck bytes before.
    pub before_bytes: u64,
    /// Stuck bytes after.
    pub after_bytes: u64,
}

/// A leak suspect that only one side has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeakChange {
    /// Whether it appeared or disappeared.
    pub kind: ChangeKind,
    /// The line.
    pub site: String,
    /// Bytes it grows by with each repetition.
    pub growth_bytes: u64,
}

impl Diff {
    /// Compares two explanations. Lines are matched by file, function and line; what is left is matched by file
    /// and function alone, because an edit above a line moves it.
    pub fn between(before: &Explanation, after: &Explanation) -> Diff {
        let at_peak = match (&before.at_peak, &after.at_peak) {
            (Some(a), Some(b)) => Some(holders(a, b)),
            _ => None,
        };
        Diff {
            schema_version: SCHEMA_VERSION,
            before: before.file.clone(),
            after: after.file.clone(),
            device_before: before.device,
            device_after: after.device,
            figures: figures(before, after),
            at_peak,
            at_end: holders(&before.end.holding, &after.end.holding),
            settings: settings(before.recording.settings.as_deref(), after.recording.settings.as_deref()),
            pinned_by: pins(&before.end.cache.pinned_by, &after.end.cache.pinned_by),
            leaks: leaks(before, after),
        }
    }

    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.figures.iter().all(|f| f.change == Some(0) || (f.before, f.after) == (None, None))
            && self.at_peak.as_ref().is_none_or(Vec::is_empty)
            && self.at_end.is_empty()
            && self.settings.is_empty()
            && self.pinned_by.is_empty()
            && self.leaks.is_empty()
    }
}

fn figures(a: &Explanation, b: &Explanation) -> Vec<FigureChange> {
    let peak = |e: &Explanation, of: fn(&crate::explain::Peaks) -> u64| e.peak.as_ref().map(of);
    let both = |figure, of: &dyn Fn(&Explanation) -> Option<u64>, is_bytes| {
        let (before, after) = (of(a), of(b));
        let change = before.zip(after).map(|(x, y)| BytesChange::between(x, y).0);
        FigureChange { figure, before, after, change, is_bytes }
    };
    // A lower bound beside an exact figure would invent a change.
    let is_comparable =
        a.peak.as_ref().map(|p| p.allocated.is_exact) == b.peak.as_ref().map(|p| p.allocated.is_exact);
    vec![
        both("peak_requested_bytes", &|e| peak(e, |p| p.requested.peak_bytes), true),
        both(
            "peak_allocated_bytes",
            &|e| if is_comparable { peak(e, |p| p.allocated.peak_bytes) } else { None },
            true,
        ),
        both("peak_reserved_bytes", &|e| peak(e, |p| p.reserved.peak_bytes), true),
        both("end_requested_bytes", &|e| Some(e.end.requested_bytes), true),
        both("end_allocated_bytes", &|e| Some(e.end.allocated_bytes), true),
        both("end_reserved_bytes", &|e| Some(e.end.reserved_bytes), true),
        both("returnable_bytes", &|e| Some(e.end.cache.returnable_bytes), true),
        both("stuck_bytes", &|e| Some(e.end.cache.stuck_bytes), true),
        both("segments", &|e| Some(e.end.segments), false),
        both("stuck_segments", &|e| Some(e.end.cache.stuck.len() as u64), false),
        both("ooms", &|e| e.peak.as_ref().map(|_| e.ooms.len() as u64), false),
    ]
}

fn holders(a: &Holding, b: &Holding) -> Vec<HolderChange> {
    let exact = |h: &Holder| (h.site.name.clone(), h.category, h.stream, h.pool);
    let mut left: FxHashMap<_, &Holder> = a.holders.iter().map(|h| (exact(h), h)).collect();
    let mut changes = Vec::new();
    let mut new: Vec<&Holder> = Vec::new();
    for holder in &b.holders {
        match left.remove(&exact(holder)) {
            Some(old) => changes.extend(change(Some(old), Some(holder))),
            None => new.push(holder),
        }
    }
    // Lines that moved: one on each side in the same function for the same purpose.
    let function = |h: &Holder| (h.site.file.clone(), h.site.function.clone(), h.category);
    let mut moved: FxHashMap<_, Vec<&Holder>> = FxHashMap::default();
    for old in left.into_values() {
        moved.entry(function(old)).or_default().push(old);
    }
    for holder in &new {
        let alone = new.iter().filter(|other| function(other) == function(holder)).count() == 1;
        let old = match moved.get_mut(&function(holder)) {
            Some(olds) if olds.len() == 1 && alone && holder.site.file.is_some() => olds.pop(),
            _ => None,
        };
        changes.extend(change(old, Some(holder)));
    }
    changes.extend(moved.into_values().flatten().filter_map(|old| change(Some(old), None)));
    changes.sort_by(|x, y| {
        y.change_bytes
            .0
            .unsigned_abs()
            .cmp(&x.change_bytes.0.unsigned_abs())
            .then_with(|| x.site.cmp(&y.site))
    });
    changes
}

/// `None` when nothing changed.
fn change(old: Option<&Holder>, new: Option<&Holder>) -> Option<HolderChange> {
    let shown = new.or(old)?;
    let (before_bytes, before_blocks) = old.map_or((0, 0), |h| (h.requested_bytes, h.blocks));
    let (after_bytes, after_blocks) = new.map_or((0, 0), |h| (h.requested_bytes, h.blocks));
    let kind = match (old, new) {
        (None, _) => ChangeKind::Appeared,
        (_, None) => ChangeKind::Disappeared,
        _ if before_bytes == after_bytes && before_blocks == after_blocks => return None,
        _ if after_bytes >= before_bytes => ChangeKind::Grew,
        _ => ChangeKind::Shrank,
    };
    let old_name = old.map(|h| &h.site.name);
    Some(HolderChange {
        site: shown.site.name.clone(),
        moved_from: old_name.filter(|name| **name != shown.site.name).cloned(),
        file: shown.site.file.clone(),
        category: shown.category,
        kind,
        before_bytes,
        after_bytes,
        change_bytes: BytesChange::between(before_bytes, after_bytes),
        before_blocks,
        after_blocks,
        stacks: stacks(old, new),
    })
}

fn stacks(old: Option<&Holder>, new: Option<&Holder>) -> Vec<StackChange> {
    let mut changes: Vec<StackChange> = Vec::new();
    let mut at: FxHashMap<&[FrameText], usize> = FxHashMap::default();
    for (holder, is_new) in old.map(|h| (h, false)).into_iter().chain(new.map(|h| (h, true))) {
        for stack in &holder.stacks {
            let index = *at.entry(&stack.frames).or_insert_with(|| {
                changes.push(StackChange { before_bytes: 0, after_bytes: 0, frames: stack.frames.clone() });
                changes.len() - 1
            });
            let side =
                if is_new { &mut changes[index].after_bytes } else { &mut changes[index].before_bytes };
            *side += stack.requested_bytes;
        }
    }
    changes.retain(|c| c.before_bytes != c.after_bytes);
    changes.sort_by_key(|c| std::cmp::Reverse(c.after_bytes.abs_diff(c.before_bytes)));
    changes
}

fn settings(a: Option<&str>, b: Option<&str>) -> Vec<SettingChange> {
    let (a, b) = (pairs(a.unwrap_or("")), pairs(b.unwrap_or("")));
    let mut keys: Vec<&str> = a.iter().chain(&b).map(|(key, _)| key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    let value =
        |of: &[(String, String)], key: &str| of.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    let changes = keys.into_iter().map(|key| SettingChange {
        key: key.to_owned(),
        before: value(&a, key),
        after: value(&b, key),
    });
    changes.filter(|c| c.before != c.after).collect()
}

/// Splits a configuration string at the commas outside brackets.
fn pairs(conf: &str) -> Vec<(String, String)> {
    let mut depth = 0_i32;
    let parts = conf.split(|c: char| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    });
    parts
        .filter(|part| !part.trim().is_empty())
        .map(|part| part.split_once(':').unwrap_or((part, "")))
        .map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()))
        .collect()
}

fn pins(a: &[PinGroup], b: &[PinGroup]) -> Vec<PinChange> {
    let mut changes: Vec<PinChange> = Vec::new();
    for (groups, is_after) in [(a, false), (b, true)] {
        for group in groups {
            let found = changes.iter().position(|c| c.sites == group.sites);
            let index = found.unwrap_or_else(|| {
                changes.push(PinChange {
                    sites: group.sites.clone(),
                    before_segments: 0,
                    after_segments: 0,
                    before_bytes: 0,
                    after_bytes: 0,
                });
                changes.len() - 1
            });
            let change = &mut changes[index];
            if is_after {
                change.after_segments += group.segments;
                change.after_bytes += group.would_return_bytes;
            } else {
                change.before_segments += group.segments;
                change.before_bytes += group.would_return_bytes;
            }
        }
    }
    changes.retain(|c| c.before_bytes != c.after_bytes || c.before_segments != c.after_segments);
    changes.sort_by(|x, y| {
        let size = |c: &PinChange| c.after_bytes.abs_diff(c.before_bytes);
        size(y).cmp(&size(x)).then_with(|| x.sites.cmp(&y.sites))
    });
    changes
}

fn leaks(a: &Explanation, b: &Explanation) -> Vec<LeakChange> {
    let of = |e: &Explanation| -> Vec<(String, u64)> {
        let suspects = e.leaks.iter().flat_map(|l| &l.suspects);
        suspects.map(|s| (s.site.clone(), s.growth_bytes)).collect()
    };
    let (before, after) = (of(a), of(b));
    let only = |here: &[(String, u64)], there: &[(String, u64)], kind: ChangeKind| -> Vec<LeakChange> {
        here.iter()
            .filter(|(site, _)| !there.iter().any(|(other, _)| other == site))
            .map(|(site, growth)| LeakChange { kind, site: site.clone(), growth_bytes: *growth })
            .collect()
    };
    let mut changes = only(&after, &before, ChangeKind::Appeared);
    changes.extend(only(&before, &after, ChangeKind::Disappeared));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_settings_outside_brackets() {
        let changes = settings(
            Some("roundup_power2_divisions:[256:1,512:2],max_split_size_mb:64"),
            Some("expandable_segments:True,max_split_size_mb:128"),
        );
        let told: Vec<_> =
            changes.iter().map(|c| (c.key.as_str(), c.before.as_deref(), c.after.as_deref())).collect();
        assert_eq!(
            told,
            [
                ("expandable_segments", None, Some("True")),
                ("max_split_size_mb", Some("64"), Some("128")),
                ("roundup_power2_divisions", Some("[256:1,512:2]"), None),
            ]
        );
    }

    fn holder(name: &str, line: u64, bytes: u64) -> Holder {
        Holder {
            site: crate::site::Site {
                name: format!("{name}:{line} (f)"),
                function: Some("f".to_owned()),
                file: Some(name.to_owned()),
                line: Some(line),
                called_from: None,
                only_torch: false,
            },
            category: Some(Category::Unknown),
            stream: None,
            pool: None,
            blocks: 1,
            requested_bytes: bytes,
            allocated_bytes: bytes,
            sizes: Vec::new(),
            oldest_age_us: None,
            stacks: Vec::new(),
        }
    }

    fn holding(holders: Vec<Holder>) -> Holding {
        Holding { holders, ..Holding::default() }
    }

    #[test]
    fn follows_a_line_that_moved() {
        let a = holding(vec![holder("a.py", 10, 100), holder("b.py", 1, 5), holder("same.py", 1, 7)]);
        let b = holding(vec![holder("a.py", 12, 300), holder("c.py", 2, 9), holder("same.py", 1, 7)]);
        let changes = holders(&a, &b);
        let told: Vec<_> = changes.iter().map(|c| (c.site.as_str(), c.kind, c.change_bytes.0)).collect();
        assert_eq!(
            told,
            [
                ("a.py:12 (f)", ChangeKind::Grew, 200),
                ("c.py:2 (f)", ChangeKind::Appeared, 9),
                ("b.py:1 (f)", ChangeKind::Disappeared, -5),
            ]
        );
        assert_eq!(changes[0].moved_from.as_deref(), Some("a.py:10 (f)"));
    }
}
