//! What the documents show as output is what the command prints. `UNHAND_UPDATE_DOCS=1` rewrites them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A line of a document's output that stands for any number of lines.
const ANYTHING: &str = "...";

/// The command as a reader who has not installed it types it.
const UNINSTALLED: &str = "cargo run --release -p unhand-cli -- ";

#[test]
fn output_in_the_documents_is_true() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let is_update = std::env::var_os("UNHAND_UPDATE_DOCS").is_some();
    let mut n_commands = 0;
    let mut differences = String::new();
    for path in documents(&repository) {
        let text = fs_err::read_to_string(&path).expect("readable");
        let shown = path.strip_prefix(&repository).expect("in the repository").display().to_string();
        let rewritten = check(&text, &repository, &mut |line, command, expected, actual| {
            n_commands += 1;
            if !matches(expected, actual) {
                let _ = writeln!(differences, "{shown}:{line}: `{command}` prints\n{actual}");
            }
        });
        if is_update && rewritten != text {
            fs_err::write(&path, rewritten).expect("written");
        }
    }
    assert!(n_commands > 0, "no command in any document: is the reader of the blocks broken?");
    let hint = "run `UNHAND_UPDATE_DOCS=1 cargo test -p unhand-cli --test documents` and read the difference";
    assert!(is_update || differences.is_empty(), "{differences}\n{hint}");
}

/// README.md and everything in `docs`, in a fixed order.
fn documents(repository: &Path) -> Vec<PathBuf> {
    let mut documents = vec![repository.join("README.md")];
    let mut folders = vec![repository.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(&folder).expect("readable") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                documents.push(path);
            }
        }
    }
    documents.sort();
    documents
}

/// Goes through the `console` blocks of one document, gives each `unhand` command with its line, the
/// output shown and the real output to `compare`, and returns the document with the real output.
fn check(text: &str, repository: &Path, compare: &mut dyn FnMut(usize, &str, &str, &str)) -> String {
    // One folder a document: what one block writes, the next may read.
    let folder = tempfile::tempdir().expect("a folder");
    let snapshots = repository.join("tests").canonicalize().expect("it is there");
    std::os::unix::fs::symlink(snapshots, folder.path().join("tests")).expect("linked");

    let mut rewritten = String::new();
    let mut lines = text.lines().enumerate().peekable();
    let mut is_console = false;
    while let Some((index, line)) = lines.next() {
        let _ = writeln!(rewritten, "{line}");
        if line.starts_with("```") {
            is_console = line == "```console";
        }
        let Some(command) = line.strip_prefix("$ ").filter(|_| is_console) else { continue };
        let mut expected = String::new();
        while let Some((_, line)) = lines.next_if(|(_, line)| !line.starts_with("$ ") && *line != "```") {
            let _ = writeln!(expected, "{line}");
        }
        let Some(runnable) = runnable(command) else {
            rewritten.push_str(&expected);
            continue;
        };
        let actual = shell(&runnable, folder.path());
        compare(index + 1, command, &expected, &actual);
        rewritten.push_str(if matches(&expected, &actual) { &expected } else { &actual });
    }
    rewritten
}

/// The command with `unhand` for cargo's long form; `None` if it does something else.
fn runnable(command: &str) -> Option<String> {
    let command = command.replace(UNINSTALLED, "unhand ");
    // Those need PyTorch: `tests/python/torch/documents.py` runs them.
    let needs_torch = ["unhand dry-run ", "unhand stand-in "].iter().any(|start| command.starts_with(start));
    (command.starts_with("unhand ") && !needs_torch).then_some(command)
}

/// What a person sees in the terminal after typing `command`.
fn shell(command: &str, folder: &Path) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_unhand"));
    let path = format!("{}:/usr/bin:/bin", binary.parent().expect("in a folder").display());
    let output = Command::new("sh")
        .args(["-c", &format!("exec 2>&1\n{command}")])
        .current_dir(folder)
        .env_clear()
        .env("PATH", path)
        .output()
        .expect("there is a shell");
    // CSV lines end with CR LF, which no document shows.
    String::from_utf8(output.stdout).expect("answers are UTF-8").replace('\r', "")
}

/// Whether `actual` is `expected`, where a line `...` stands for any lines.
fn matches(expected: &str, actual: &str) -> bool {
    let expected: Vec<&str> = expected.lines().map(str::trim_end).collect();
    let actual: Vec<&str> = actual.lines().map(str::trim_end).collect();
    matches_lines(&expected, &actual)
}

fn matches_lines(expected: &[&str], actual: &[&str]) -> bool {
    match (expected, actual) {
        ([ANYTHING, expected @ ..], _) => {
            (0..=actual.len()).any(|n_skipped| matches_lines(expected, &actual[n_skipped..]))
        }
        ([first, expected @ ..], [line, actual @ ..]) => first == line && matches_lines(expected, actual),
        ([], []) => true,
        _ => false,
    }
}

#[test]
fn three_dots_stand_for_any_lines() {
    for (expected, actual) in [("a\n...\n", "a\n"), ("a\n...\nd\n", "a\nb\nc\nd\n"), ("a", "a \n")] {
        assert!(matches(expected, actual), "{expected:?} {actual:?}");
    }
    for (expected, actual) in [("a\n", "b\n"), ("a\n...\nd\n", "a\nb\n"), ("a\n", "a\nb\n"), ("a\n", "")] {
        assert!(!matches(expected, actual), "{expected:?} {actual:?}");
    }
}

#[test]
fn only_our_own_command_is_run() {
    assert_eq!(runnable("unhand explain a"), Some("unhand explain a".to_owned()));
    assert_eq!(
        runnable("cargo run --release -p unhand-cli -- explain a"),
        Some("unhand explain a".to_owned())
    );
    assert_eq!(runnable("cargo xtask test"), None);
    assert_eq!(runnable("unhand dry-run train.py"), None);
}
