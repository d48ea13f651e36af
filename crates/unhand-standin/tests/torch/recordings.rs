//! Workloads that were recorded on an H200, run again on the stand-in: every event must come again.
//!
//! Only with the release that the recordings were made with: others ask for memory in other ways.

use crate::bench::{RECORDED, bench, root, words};

/// Runs a workload and compares its recording with the one in `tests/snapshots`.
fn repeats(workload: &str, tag: &str, settings: &str, fraction_gb: Option<&str>) {
    let Some(bench) = bench(RECORDED) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let folder_text = folder.path().to_string_lossy().into_owned();
    let record = root().join("tests/gpu/record.py");
    let record_text = record.to_string_lossy().into_owned();
    let mut arguments = vec![record_text.as_str(), workload, &folder_text, tag];
    if tag == "stacks" {
        arguments.push("stacks");
    }
    let mut environment = Vec::new();
    if !settings.is_empty() {
        environment.push(("PYTORCH_CUDA_ALLOC_CONF", settings));
    }
    environment.extend(fraction_gb.map(|fraction| ("FRACTION_GB", fraction)));
    let output = bench.run(&arguments, &environment);
    assert!(output.status.success(), "{workload}.{tag}:\n{}", words(&output));

    let name = format!("{workload}.{tag}.pickle.xz");
    let expected = root().join("tests/snapshots").join(&name);
    let compare = root().join("tests/standin/compare.py");
    let output = std::process::Command::new("python3")
        .args([&compare, &expected, &folder.path().join(&name)])
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", words(&output));
}

#[test]
fn churn() {
    repeats("churn", "default", "", None);
    repeats("churn", "exp", "expandable_segments:True", None);
}

#[test]
fn leak() {
    repeats("leak", "default", "", None);
    repeats("leak", "exp", "expandable_segments:True", None);
    repeats("leak", "stacks", "", None);
}

#[test]
fn streams() {
    repeats("streams", "default", "", None);
    repeats("streams", "exp", "expandable_segments:True", None);
    repeats("streams", "split64", "max_split_size_mb:64", None);
}

#[test]
fn gpt2() {
    repeats("gpt2", "default", "", None);
    repeats("gpt2", "exp", "expandable_segments:True", None);
    repeats("gpt2", "split64", "max_split_size_mb:64", None);
    repeats("gpt2", "round4", "roundup_power2_divisions:4", None);
    repeats("gpt2", "stacks", "", None);
}

#[test]
fn gpt2_until_it_runs_out_of_memory() {
    repeats("gpt2", "gc", "garbage_collection_threshold:0.6", Some("12"));
}
