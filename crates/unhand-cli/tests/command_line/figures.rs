//! The figures of an answer are those that PyTorch itself reported when the run was recorded.

use std::path::Path;

use serde_json::Value;

use crate::run::{json_of, recording};

/// Recordings with a `.json` beside them that has `torch.cuda.memory_stats()` at the end of the run.
fn recordings() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/snapshots");
    let mut names: Vec<String> = fs_err::read_dir(folder)
        .expect("the recordings are there")
        .filter_map(|entry| {
            let name = entry.expect("readable").file_name().into_string().expect("UTF-8");
            name.strip_suffix(".json").map(str::to_owned)
        })
        .collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    names
}

fn reported(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/snapshots/{name}.json"));
    let text = fs_err::read_to_string(path).expect("the figures are there");
    serde_json::from_str(&text).expect("they are JSON")
}

#[test]
fn explain_has_the_figures_of_pytorch() {
    for name in recordings() {
        let stats = &reported(&name)["stats"];
        let answer = json_of(&["explain", "--json", &recording(&name)]);
        assert_eq!(answer["schema_version"], 1);
        let explanation = &answer["explanations"][0];
        let (peak, end) = (&explanation["peak"], &explanation["end"]);
        let expected = [
            ("requested_bytes.all.peak", &peak["requested"]["peak_bytes"]),
            ("allocated_bytes.all.peak", &peak["allocated"]["peak_bytes"]),
            ("reserved_bytes.all.peak", &peak["reserved"]["peak_bytes"]),
            ("requested_bytes.all.current", &end["requested_bytes"]),
            ("allocated_bytes.all.current", &end["allocated_bytes"]),
            ("reserved_bytes.all.current", &end["reserved_bytes"]),
        ];
        for (key, value) in expected {
            assert_eq!(&stats[key], value, "{name}: {key}");
        }
    }
}

#[test]
fn the_recorded_run_of_a_replay_has_the_figures_of_pytorch() {
    for name in recordings() {
        let stats = &reported(&name)["stats"];
        let answer = json_of(&["replay", "--json", &recording(&name)]);
        assert_eq!(answer["schema_version"], 1);
        let run = &answer["runs"][0];
        assert_eq!(run["recorded"], true);
        let (peak, end) = (&run["peak"], &run["end"]);
        let expected = [
            ("requested_bytes.all.peak", &peak["requested_bytes"]),
            ("allocated_bytes.all.peak", &peak["allocated_bytes"]),
            ("reserved_bytes.all.peak", &peak["reserved_bytes"]),
            ("requested_bytes.all.current", &end["requested_bytes"]),
            ("allocated_bytes.all.current", &end["allocated_bytes"]),
            ("reserved_bytes.all.current", &end["reserved_bytes"]),
            ("num_ooms", &run["ooms"]),
        ];
        for (key, value) in expected {
            assert_eq!(&stats[key], value, "{name}: {key}");
        }
    }
}
