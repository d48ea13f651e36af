//! `unhand run` as far as the command itself goes, and `unhand explain` on what the flight recorder wrote.

use std::path::Path;

use insta::assert_snapshot;

use crate::run::{describe, json_of, recording, run, run_in, unhand};

#[test]
fn run_says_how_it_is_used() {
    assert_snapshot!(run(&["run", "--help"]), @"");
    assert_snapshot!(run(&["run"]), @"");
}

#[test]
fn options_of_run_are_told_from_those_of_the_program() {
    assert_snapshot!(run(&["run", "--recordngs", "oom", "train.py"]), @"");
    assert_snapshot!(run(&["run", "-m"]), @"");
    assert_snapshot!(run(&["run", "--history", "all", "train.py"]), @"");
}

#[cfg(unix)]
#[test]
fn run_hands_over_to_python() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().expect("a folder");
    let of = |arguments: &[&str]| {
        let output = unhand(arguments).env("PATH", folder.path()).output();
        describe(&output.expect("the binary was built for this test"))
    };
    assert_snapshot!(of(&["run", "train.py"]), @"");
    let python = folder.path().join("python3");
    fs_err::write(&python, "#!/bin/sh\necho \"$@\"\nexit 7\n").expect("written");
    fs_err::set_permissions(&python, PermissionsExt::from_mode(0o755)).expect("allowed");
    assert_snapshot!(of(&["--color", "never", "run", "--limit", "2", "train.py", "--limit", "x"]), @"");
}

/// Recordings of three ranks, the last of which did something else, below one of an earlier run.
fn ranks(folder: &Path) {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let made = [
        ("20260101-000000-77/rank0", "churn.default", 1),
        ("20260102-000000-88/rank0", "gpt2.stacks", 8),
        ("20260102-000000-88/rank1", "gpt2.stacks", 8),
        ("20260102-000000-88/rank2", "leak.stacks", 16),
    ];
    for (place, name, batch) in made {
        let place = folder.join(place);
        fs_err::create_dir_all(&place).expect("created");
        fs_err::copy(repository.join(recording(name)), place.join("snapshot.pickle.xz")).expect("copied");
        let rank = place.file_name().expect("a name").to_string_lossy().replace("rank", "");
        let report = format!("{{\"rank\": {rank}, \"inputs\": [{{\"name\": \"tokens\", \"shape\": [{batch}, 512]}}]}}");
        fs_err::write(place.join("report.json"), report).expect("written");
    }
    // One that was not finished.
    fs_err::create_dir_all(folder.join("20260102-000000-88/.rank3.9-9.part")).expect("created");
}

#[test]
fn a_folder_of_recordings_is_its_newest_run() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(folder.path());
    let all = folder.path().display().to_string();
    assert_snapshot!(run_in(folder.path(), &["explain", &all]), @"");
    let answer = json_of(&["explain", "--json", &format!("{all}/20260102-000000-88")]);
    assert_eq!(answer["comparison"]["different"]["row"], 2);
    assert_eq!(answer["explanations"].as_array().map(Vec::len), Some(3));
    let one = json_of(&["explain", "--json", &format!("{all}/20260101-000000-77")]);
    assert_eq!(one["explanations"].as_array().map(Vec::len), Some(1));
    assert!(one["comparison"].is_null());
}
