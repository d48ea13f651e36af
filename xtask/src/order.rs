//! The order of the crates: a crate uses only crates above it in the list.

use std::process::Command;

use serde_json::Value;

use crate::Failure;
use crate::finding::Finding;
use crate::tree::{Tree, root};

/// The crates, lowest first. ARCHITECTURE.md gives the reason for each place.
const ORDER: &[&str] = &[
    "unhand-alloc",
    "unhand-cuda",
    "unhand-snapshot",
    "unhand-analyze",
    "unhand-heap",
    "unhand-monitor",
    "unhand-server",
    "unhand-standin",
    "unhand-cli",
    "unhand-python",
];

/// Crates outside the order: nothing may depend on them.
const OUTSIDE: &[&str] = &["xtask"];

const DOCUMENTS: &[&str] = &["README.md", "ARCHITECTURE.md"];

/// Asks cargo who uses whom, and checks that the documents name every crate.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Failure> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .map_err(|error| format!("cannot run `cargo metadata`: {error}"))?;
    if !output.status.success() {
        return Err(format!("`cargo metadata` failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let uses = uses(&metadata);
    let mut findings = out_of_order(&uses);
    findings.extend(unmentioned(tree, &uses));
    Ok(findings)
}

/// A crate of the workspace and the workspace crates it names, tests included.
struct Uses {
    name: String,
    dependencies: Vec<String>,
}

fn uses(metadata: &Value) -> Vec<Uses> {
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let members: Vec<String> = packages.iter().map(name).collect();
    packages
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
            let dependencies = dependencies.iter().map(name).filter(|name| members.contains(name)).collect();
            Uses { name: name(package), dependencies }
        })
        .collect()
}

fn out_of_order(uses: &[Uses]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let place = |name: &str| ORDER.iter().position(|member| *member == name);
    for Uses { name, dependencies } in uses {
        if OUTSIDE.contains(&name.as_str()) {
            continue;
        }
        let manifest = format!("crates/{name}/Cargo.toml");
        let Some(own_place) = place(name) else {
            let hint = "give it a place in ORDER in xtask/src/order.rs and in ARCHITECTURE.md";
            findings.push(Finding::new(&manifest, 0, format!("`{name}` has no place in the order"), hint));
            continue;
        };
        for dependency in dependencies {
            if place(dependency).is_none_or(|place| place >= own_place) {
                let what = format!("`{name}` uses `{dependency}`, which is not above it");
                let hint = "move the shared part up, or the using part down";
                findings.push(Finding::new(&manifest, 0, what, hint));
            }
        }
    }
    findings
}

fn unmentioned(tree: &Tree, uses: &[Uses]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for document in DOCUMENTS {
        let text = tree.text(document).unwrap_or_default();
        for Uses { name, .. } in uses {
            if !text.contains(name.as_str()) {
                let hint = "say in one sentence what the crate is for";
                findings.push(Finding::new(document, 0, format!("`{name}` is not mentioned"), hint));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tree_of;

    fn metadata(packages: &[(&str, &[&str])]) -> Vec<Uses> {
        let packages: Vec<Value> = packages
            .iter()
            .map(|(name, dependencies)| {
                let dependencies: Vec<Value> =
                    dependencies.iter().map(|name| serde_json::json!({ "name": name })).collect();
                serde_json::json!({ "name": name, "dependencies": dependencies })
            })
            .collect();
        uses(&serde_json::json!({ "packages": packages }))
    }

    fn complaints(findings: &[Finding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.what.as_str()).collect()
    }

    #[test]
    fn accepts_uses_of_crates_above() {
        let uses = metadata(&[
            ("unhand-alloc", &["serde"]),
            ("unhand-analyze", &["unhand-alloc"]),
            ("xtask", &["unhand-analyze"]),
        ]);
        assert!(out_of_order(&uses).is_empty());
    }

    #[test]
    fn refuses_a_use_of_a_crate_below_and_an_unknown_crate() {
        let uses = metadata(&[
            ("unhand-alloc", &["unhand-analyze", "xtask"]),
            ("unhand-analyze", &[]),
            ("unhand-attic", &[]),
            ("xtask", &[]),
        ]);
        let findings = out_of_order(&uses);
        assert_eq!(
            complaints(&findings),
            [
                "`unhand-alloc` uses `unhand-analyze`, which is not above it",
                "`unhand-alloc` uses `xtask`, which is not above it",
                "`unhand-attic` has no place in the order",
            ]
        );
    }

    #[test]
    fn every_crate_is_in_both_documents() {
        let uses = metadata(&[("unhand-alloc", &[])]);
        let tree = tree_of(&[("README.md", "`unhand-alloc`"), ("ARCHITECTURE.md", "")]);
        let findings = unmentioned(&tree, &uses);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].path, "ARCHITECTURE.md");
    }
}
