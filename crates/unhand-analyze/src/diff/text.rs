//! A [`Diff`] as a page to read.

use std::fmt::{self, Write};

use crate::diff::{ChangeKind, Diff, HolderChange};
use crate::explain::TextOptions;
use crate::prose::{Count, keep_end, plural};
use unhand_alloc::{Bytes, BytesChange};

impl Diff {
    /// Writes the differences as text.
    pub fn render(&self, options: &TextOptions) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut out, options);
        out
    }

    fn write(&self, out: &mut String, options: &TextOptions) -> fmt::Result {
        let style = options.style;
        let name = |file: &Option<String>, device: usize| match file {
            Some(file) => format!("{file}, device {device}"),
            None => format!("device {device}"),
        };
        let before = name(&self.before, self.device_before);
        let after = name(&self.after, self.device_after);
        writeln!(out, "{}", style.strong(format!("{before}  ->  {after}")))?;
        if self.is_empty() {
            return writeln!(out, "\nNothing differs.");
        }
        for setting in &self.settings {
            let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".to_owned());
            writeln!(out, "  {}: {} -> {}", setting.key, shown(&setting.before), shown(&setting.after))?;
        }
        writeln!(out)?;
        for figure in &self.figures {
            let shown = |n: Option<u64>| match n {
                None => "n/a".to_owned(),
                Some(n) if figure.is_bytes => Bytes(n).to_string(),
                Some(n) => Count(n).to_string(),
            };
            let change = match figure.change {
                Some(0) => "same".to_owned(),
                Some(n) if figure.is_bytes => BytesChange(n).to_string(),
                Some(n) => format!("{n:+}"),
                None => String::new(),
            };
            let label = figure.figure.trim_end_matches("_bytes").replace('_', " ");
            let row = format!(
                "  {label:<15}  {:>10}  {:>10}  {change:>10}",
                shown(figure.before),
                shown(figure.after)
            );
            if figure.change == Some(0) {
                writeln!(out, "{}", style.faint(row))?;
            } else {
                writeln!(out, "{}", row.trim_end())?;
            }
        }
        for leak in &self.leaks {
            let sentence = match leak.kind {
                ChangeKind::Appeared => format!(
                    "New leak suspect: {} grows by {} with every repetition.",
                    leak.site,
                    Bytes(leak.growth_bytes)
                ),
                _ => format!(
                    "No longer a leak suspect: {} (grew by {} with every repetition).",
                    leak.site,
                    Bytes(leak.growth_bytes)
                ),
            };
            writeln!(out, "\n{}", style.warning(sentence))?;
        }
        if let Some(changes) = self.at_peak.as_ref().filter(|c| !c.is_empty()) {
            writeln!(out, "\n{}", style.strong("Holders at the peak"))?;
            write_holders(out, changes, options)?;
        }
        if !self.at_end.is_empty() {
            writeln!(out, "\n{}", style.strong("Holders at the end"))?;
            write_holders(out, &self.at_end, options)?;
        }
        if !self.pinned_by.is_empty() {
            writeln!(out, "\n{}", style.strong("Stuck memory"))?;
            for pin in self.pinned_by.iter().take(options.limit) {
                let lines = match pin.sites.as_slice() {
                    [] => "live blocks".to_owned(),
                    [one] => one.clone(),
                    [one, rest @ ..] => format!("{one} and {}", plural(rest.len() as u64, "other line")),
                };
                let row = format!(
                    "  {:>10} -> {:>10}  in {} -> {} segments, beside {lines}",
                    Bytes(pin.before_bytes),
                    Bytes(pin.after_bytes),
                    pin.before_segments,
                    pin.after_segments
                );
                writeln!(out, "{row}")?;
            }
        }
        Ok(())
    }
}

fn write_holders(out: &mut String, changes: &[HolderChange], options: &TextOptions) -> fmt::Result {
    for change in changes.iter().take(options.limit) {
        let kind = match change.kind {
            ChangeKind::Appeared => "new",
            ChangeKind::Disappeared => "gone",
            ChangeKind::Grew => "grew",
            ChangeKind::Shrank => "shrank",
        };
        let mut row = format!(
            "  {:>11}  {kind:<6}  {:>9} -> {:>9}  ",
            change.change_bytes,
            Bytes(change.before_bytes),
            Bytes(change.after_bytes)
        );
        if let Some(category) = change.category {
            let _ = write!(row, "{:<15}  ", category.label());
        }
        let mut line = change.site.clone();
        if let Some(from) = &change.moved_from {
            let _ = write!(line, " [was {from}]");
        }
        let room = options.width.saturating_sub(row.chars().count()).max(20);
        writeln!(out, "{row}{}", keep_end(&line, room))?;
        if options.stacks {
            for stack in &change.stacks {
                writeln!(out, "      {} -> {}:", Bytes(stack.before_bytes), Bytes(stack.after_bytes))?;
                for frame in &stack.frames {
                    writeln!(out, "        {frame}")?;
                }
            }
        }
    }
    if changes.len() > options.limit {
        let rest: i64 = changes[options.limit..].iter().map(|c| c.change_bytes.0).sum();
        let n = (changes.len() - options.limit) as u64;
        writeln!(out, "  {:>11}  in {}", BytesChange(rest), plural(n, "more holder"))?;
    }
    Ok(())
}
