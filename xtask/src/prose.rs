//! House rules for what people read: the recipes of the justfile and the links between documents.

use crate::finding::Finding;
use crate::tree::{File, Tree};

/// More recipes than this and nobody reads the list.
const MAX_RECIPES: usize = 15;

/// Applies the rules of this file.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(justfile) = tree.text("justfile") {
        recipes(justfile, &mut findings);
    }
    for file in tree.files.iter().filter(|file| file.extension() == "md") {
        links(file, tree, &mut findings);
        named_files(file, tree, &mut findings);
    }
    findings
}

fn recipes(justfile: &str, findings: &mut Vec<Finding>) {
    let mut n_recipes = 0;
    let mut n_body_lines = 0;
    for (index, line) in justfile.lines().enumerate() {
        if is_recipe(line) {
            n_recipes += 1;
            n_body_lines = 0;
        } else if line.starts_with([' ', '\t']) && !line.trim().is_empty() {
            n_body_lines += 1;
            if n_body_lines == 2 {
                let hint = "move the steps into a script or into xtask";
                findings.push(Finding::new("justfile", index + 1, "a recipe of more than one line", hint));
            }
        }
    }
    if n_recipes > MAX_RECIPES {
        let what = format!("{n_recipes} recipes, more than {MAX_RECIPES}");
        findings.push(Finding::new("justfile", 0, what, "drop what a person can type as easily"));
    }
}

/// `name arguments…:` at the start of a line, and not an assignment (`:=`).
fn is_recipe(line: &str) -> bool {
    line.starts_with(|c: char| c.is_ascii_alphabetic())
        && line.split_once(':').is_some_and(|(_, after)| !after.starts_with('='))
}

/// Relative links must lead to a file that is there.
fn links(file: &File, tree: &Tree, findings: &mut Vec<Finding>) {
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    for (index, line) in file.text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let path = resolve(folder, target);
            let is_there = tree.files.iter().any(|file| {
                file.path == path || file.path.starts_with(&format!("{}/", path.trim_end_matches('/')))
            });
            if !is_there {
                let what = format!("the link `{target}` leads nowhere");
                findings.push(Finding::new(&file.path, index + 1, what, "name the file from this folder"));
            }
        }
    }
}

/// A Rust file named with its path from the root must be there: ARCHITECTURE.md names the test of each invariant.
fn named_files(file: &File, tree: &Tree, findings: &mut Vec<Finding>) {
    for (index, line) in file.text.lines().enumerate() {
        // What stands between backticks is every second part.
        for name in line.split('`').skip(1).step_by(2) {
            let is_rust = name.rsplit_once('.').is_some_and(|(_, extension)| extension == "rs");
            let is_path = is_rust && name.contains('/') && !name.contains([' ', '*']);
            if is_path && tree.text(name).is_none() {
                let what = format!("`{name}` is not there");
                findings.push(Finding::new(&file.path, index + 1, what, "name the file from the root"));
            }
        }
    }
}

/// `target` seen from `folder`, with `.` and `..` taken out.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tree_of;

    fn complaints(files: &[(&str, &str)]) -> Vec<String> {
        check(&tree_of(files)).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn counts_recipes_but_not_settings() {
        let few = "set shell := [\"bash\"]\nx := \"1\"\n# Runs.\ntest *args:\n    cargo test\n";
        assert!(complaints(&[("justfile", few)]).is_empty());
        let many = "recipe:\n    true\n".repeat(16);
        assert_eq!(complaints(&[("justfile", &many)]), ["16 recipes, more than 15"]);
        assert_eq!(
            complaints(&[("justfile", "a:\n    true\n    true\n")]),
            ["a recipe of more than one line"]
        );
    }

    #[test]
    fn looks_for_the_files_it_reads_of() {
        let readme = ("README.md", "See `a/b.rs`, `open.rs` and `cargo run x/y.rs`.");
        assert_eq!(complaints(&[readme]), ["`a/b.rs` is not there"]);
        assert!(complaints(&[readme, ("a/b.rs", "")]).is_empty());
    }

    #[test]
    fn follows_relative_links() {
        let readme = ("README.md", "[a](docs/a.md) [b](https://b.example) [c](docs/) [d](#d)");
        assert!(complaints(&[readme, ("docs/a.md", "[up](../README.md#x)")]).is_empty());
        assert_eq!(complaints(&[("docs/a.md", "[gone](gone.md)")]), ["the link `gone.md` leads nowhere"]);
    }
}
