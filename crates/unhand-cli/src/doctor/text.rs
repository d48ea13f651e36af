//! A diagnosis as text: the findings by topic, and how many of them need somebody.

use std::fmt::Write as _;

use unhand_analyze::{Style, wrap};

use super::finding::{Diagnosis, Finding, Level};

/// Where sentences begin: after two spaces, the level, and two spaces.
const INDENT: usize = 11;

/// The whole answer for a reader with this many columns.
pub(crate) fn render(diagnosis: &Diagnosis, style: Style, width: usize) -> String {
    let mut text = String::new();
    let mut topic = None;
    for finding in &diagnosis.findings {
        if topic != Some(finding.topic) {
            let gap = if topic.is_none() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}{}", style.strong(finding.topic));
            topic = Some(finding.topic);
        }
        write_finding(&mut text, finding, style, width);
    }
    let _ = writeln!(text, "\n{}", summary(diagnosis));
    text
}

fn write_finding(text: &mut String, finding: &Finding, style: Style, width: usize) {
    // Padded before it is painted: a colour has a length, too.
    let level = format!("{:<7}", finding.level);
    let level = match finding.level {
        Level::Ok => level,
        Level::Note => style.faint(level).to_string(),
        Level::Warning => style.warning(level).to_string(),
        Level::Problem => style.strong(level).to_string(),
    };
    let _ = writeln!(text, "  {level}  {}", indented(&finding.sentence, width));
    if let Some(hint) = &finding.hint {
        let _ = writeln!(text, "{:INDENT$}{}", "", indented(&format!("hint: {hint}"), width));
    }
}

/// Broken into lines that all begin where sentences do.
fn indented(sentence: &str, width: usize) -> String {
    let room = width.saturating_sub(INDENT).max(20);
    wrap(sentence, room, 0).replace('\n', &format!("\n{:INDENT$}", ""))
}

fn summary(diagnosis: &Diagnosis) -> String {
    let counted = |level, one: &str, many: &str| match diagnosis.count(level) {
        0 => None,
        1 => Some(format!("1 {one}")),
        n => Some(format!("{n} {many}")),
    };
    let counts =
        [counted(Level::Problem, "problem", "problems"), counted(Level::Warning, "warning", "warnings")];
    let counts: Vec<String> = counts.into_iter().flatten().collect();
    if counts.is_empty() { "No problem found.".to_owned() } else { format!("{}.", counts.join(", ")) }
}
