//! House rules that look at one file at a time: header, length, `unsafe`, purity, forbidden words.

use crate::finding::Finding;
use crate::tree::{File, Tree};

/// A Rust or Python file longer than this is two files.
const MAX_LINES: usize = 850;

/// The only files that may contain `unsafe`. Each block in them states why it is sound.
const UNSAFE_FILES: &[&str] = &[
    // Maps large snapshots into memory.
    "crates/unhand-cli/src/open.rs",
    // The same, to measure it.
    "benches/snapshot/src/main.rs",
    // Calls CPython's `tp_traverse` on every object.
    "crates/unhand-python/src/capture.rs",
    // Calls a function of NVML that the crate behind it does not wrap.
    "crates/unhand-monitor/src/nvml/memory.rs",
    // Exports C functions: the macros that guard them.
    "crates/unhand-standin/src/entry.rs",
    // Reads and writes through pointers that C programs pass.
    "crates/unhand-standin/src/pointers.rs",
    // Maps and moves memory.
    "crates/unhand-standin/src/sys.rs",
    // Moves bytes between a program's addresses, calls its functions, unmaps what it gives back.
    "crates/unhand-standin/src/gpu/copy.rs",
    "crates/unhand-standin/src/gpu/emulate.rs",
    "crates/unhand-standin/src/entry/runtime_graph.rs",
    "crates/unhand-standin/src/entry/runtime_launch.rs",
    "crates/unhand-standin/src/entry/runtime_memory.rs",
];

/// Crates that take bytes or events and give values: no file, no thread, no socket, no environment.
const PURE_CRATES: &[&str] = &["unhand-alloc", "unhand-snapshot", "unhand-analyze", "unhand-heap"];

/// What a pure crate does not name. Tests may: they read the recorded snapshots.
const IMPURE: &[&str] = &["std::fs", "fs_err", "std::thread", "std::net", "std::process", "std::env::"];

/// Words that do not belong in the project, and why. Written in two halves, so that this file passes.
const FORBIDDEN: &[(&str, &str)] = &[
    (concat!("crates", ".io"), "name the crate, not the registry that serves it"),
    (concat!("static.", "crates"), "name the crate, not the registry that serves it"),
    (concat!("pypi", ".org"), "name the package, not the registry that serves it"),
    (concat!("python", "hosted"), "name the package, not the registry that serves it"),
    (concat!("npm", "js.org"), "name the package, not the registry that serves it"),
    (concat!("deb.", "debian"), "name the package, not the mirror that serves it"),
    (concat!("/wo", "rk/"), "use a path relative to the repository"),
    (concat!("/ro", "ot/"), "use a path relative to the repository"),
    (concat!("TO", "DO"), "do it, or say in CHANGELOG.md or docs what is not there yet"),
    (concat!("FIX", "ME"), "fix it, or say in CHANGELOG.md or docs what is not there yet"),
];

/// Files that machines write and whose words are not ours.
fn is_generated(path: &str) -> bool {
    path.ends_with("Cargo.lock") || path.starts_with("tests/snapshots/")
}

/// Applies every rule of this file to every file.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        if !is_generated(&file.path) {
            forbidden_words(file, &mut findings);
        }
        if matches!(file.extension(), "rs" | "py" | "cpp" | "c" | "h") {
            length(file, &mut findings);
        }
        if file.extension() == "rs" {
            header(file, &mut findings);
            unsafety(file, &mut findings);
            purity(file, &mut findings);
        }
    }
    findings
}

fn header(file: &File, findings: &mut Vec<Finding>) {
    let first = file.text.lines().find(|line| !line.starts_with("#!")).unwrap_or_default();
    if first.strip_prefix("//!").is_none_or(|sentence| sentence.trim().is_empty()) {
        let hint = "open it with one `//!` sentence: what it is for and, if so, what it must not do";
        findings.push(Finding::new(&file.path, 1, "the file does not say what it is for", hint));
    }
}

fn length(file: &File, findings: &mut Vec<Finding>) {
    let n_lines = file.text.lines().count();
    if n_lines > MAX_LINES {
        let what = format!("{n_lines} lines, more than {MAX_LINES}");
        let hint = "split it by what a reader would look for";
        findings.push(Finding::new(&file.path, n_lines, what, hint));
    }
}

fn unsafety(file: &File, findings: &mut Vec<Finding>) {
    if UNSAFE_FILES.contains(&file.path.as_str()) {
        return;
    }
    for (line, code) in code_lines(&file.text) {
        if is_unsafe(&code) {
            let hint = "find a safe way, or add the file to UNSAFE_FILES in xtask/src/rules.rs with a reason";
            findings.push(Finding::new(&file.path, line, "`unsafe` outside the listed files", hint));
        }
    }
}

/// Whether a line of code opens an unsafe block or item, or allows the lint that forbids one.
fn is_unsafe(code: &str) -> bool {
    if code.contains("allow(unsafe_code") || code.contains("expect(unsafe_code") {
        return true;
    }
    words(code).enumerate().any(|(index, word)| {
        word == "unsafe" && {
            let next = words(code).nth(index + 1);
            let after = code.split_once("unsafe").map_or("", |(_, after)| after.trim_start());
            matches!(next, Some("fn" | "impl" | "extern" | "trait"))
                || after.starts_with(['{', '('])
                || after.is_empty()
        }
    })
}

fn purity(file: &File, findings: &mut Vec<Finding>) {
    let is_pure_source = PURE_CRATES.iter().any(|name| file.path.starts_with(&format!("crates/{name}/src/")));
    if !is_pure_source {
        return;
    }
    for (line, code) in code_lines(&file.text) {
        // Unit tests come last in a file and may read recorded snapshots.
        if code.starts_with("#[cfg(test)]") {
            return;
        }
        if let Some(word) = IMPURE.iter().find(|word| code.contains(**word)) {
            let what = format!("`{word}` in a crate that takes values and gives values");
            let hint = "let the caller do it: the command line opens files and starts threads";
            findings.push(Finding::new(&file.path, line, what, hint));
        }
    }
}

fn forbidden_words(file: &File, findings: &mut Vec<Finding>) {
    for (index, text) in file.text.lines().enumerate() {
        for (word, hint) in FORBIDDEN {
            if text.contains(word) {
                findings.push(Finding::new(&file.path, index + 1, format!("`{word}`"), hint));
            }
        }
    }
}

/// Lines of code with their numbers, without comments and without what stands in string literals.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, String)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, code_of(line)))
        .filter(|(_, code)| !code.is_empty())
}

/// One line without its comment and the contents of its strings. A string that spans lines is taken
/// for code, which can only find too much.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut in_string = false;
    let mut chars = line.trim().chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if in_string => drop(chars.next()),
            '"' => {
                in_string = !in_string;
                code.push(c);
            }
            '/' if !in_string && chars.peek() == Some(&'/') => break,
            c if !in_string => code.push(c),
            _ => {}
        }
    }
    code
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tree_of;

    /// The places and complaints a tree of one file gets.
    fn complaints(path: &str, text: &str) -> Vec<String> {
        let findings = check(&tree_of(&[(path, text)]));
        findings.iter().map(|finding| format!("{}: {}", finding.line, finding.what)).collect()
    }

    #[test]
    fn accepts_a_file_that_says_what_it_is_for() {
        assert!(complaints("crates/a/src/lib.rs", "//! Adds numbers.\nfn add() {}\n").is_empty());
    }

    #[test]
    fn asks_for_a_header() {
        for text in ["fn add() {}\n", "", "//!\n", "// Adds numbers.\n"] {
            assert_eq!(complaints("a.rs", text), ["1: the file does not say what it is for"], "{text:?}");
        }
    }

    #[test]
    fn finds_unsafe_in_code_only() {
        let open = "//! Opens.\nlet x = unsafe { f() };\n";
        assert_eq!(complaints("crates/a/src/lib.rs", open), ["2: `unsafe` outside the listed files"]);
        assert!(complaints("crates/unhand-cli/src/open.rs", open).is_empty());
        for code in ["unsafe fn f() {}", "#[unsafe(no_mangle)]", "#![allow(unsafe_code)]", "unsafe"] {
            assert_eq!(complaints("a.rs", &format!("//! A.\n{code}\n")).len(), 1, "{code}");
        }
        for code in ["// unsafe { f() }", "let unsafe_files = 1;", r#"say("\"unsafe { words }");"#] {
            assert!(complaints("a.rs", &format!("//! A.\n{code}\n")).is_empty(), "{code}");
        }
    }

    #[test]
    fn keeps_pure_crates_pure_outside_their_tests() {
        let text = "//! A.\nuse std::fs;\n#[cfg(test)]\nmod tests { use std::fs; }\n";
        let path = "crates/unhand-alloc/src/lib.rs";
        assert_eq!(complaints(path, text), ["2: `std::fs` in a crate that takes values and gives values"]);
        assert!(complaints("crates/unhand-alloc/tests/a.rs", text).is_empty());
        assert!(complaints("crates/unhand-cli/src/a.rs", text).is_empty());
    }

    #[test]
    fn measures_length() {
        let text = format!("//! A.\n{}", "\n".repeat(MAX_LINES));
        assert_eq!(complaints("a.rs", &text), ["851: 851 lines, more than 850"]);
    }

    #[test]
    fn names_forbidden_words_with_their_line() {
        let text = format!("fine\nsee {}x\n", concat!("/wo", "rk/"));
        assert_eq!(complaints("a.md", &text), [concat!("2: `/wo", "rk/`")]);
        assert!(complaints("Cargo.lock", &text).is_empty());
    }
}
