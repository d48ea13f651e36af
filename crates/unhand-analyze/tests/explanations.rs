//! Whole explanations as a person reads them.

mod support;

use support::recording;
use unhand_analyze::{Diff, ExplainOptions, TextOptions, explain, render};

fn page(name: &str) -> String {
    let options = ExplainOptions { file: Some(format!("{name}.pickle.xz")), ..ExplainOptions::default() };
    let text =
        render(&explain(&recording(name), 0, &options).expect("device 0 is there"), &TextOptions::default());
    let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    assert!(widest <= 100, "{name}: a line of {widest} columns");
    assert!(!text.contains('\x1b'), "plain text has no escape codes");
    text
}

#[test]
fn explains_a_training_run() {
    insta::assert_snapshot!(page("gpt2.stacks"), @"");
}

#[test]
fn explains_a_leak() {
    insta::assert_snapshot!(page("leak.stacks"), @"");
}

#[test]
fn explains_streams_and_pools() {
    insta::assert_snapshot!(page("streams.default"), @"");
}

#[test]
fn explains_an_out_of_memory_error() {
    insta::assert_snapshot!(page("gpt2.gc"), @"");
}

#[test]
fn explains_what_a_setting_changed() {
    let of = |name: &str| {
        let options = ExplainOptions { file: Some(format!("{name}.pickle.xz")), ..ExplainOptions::default() };
        explain(&recording(name), 0, &options).expect("device 0 is there")
    };
    let diff = Diff::between(&of("gpt2.default"), &of("gpt2.split64"));
    insta::assert_snapshot!(diff.render(&TextOptions::default()), @"");
}
