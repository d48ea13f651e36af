//! The scripts of `tests/standin`, on every release, and what the launcher itself promises.

use crate::bench::{Bench, RELEASES, bench, root, words};

/// Runs a script that closes with how many checks passed.
fn script(name: &str, environment: &[(&str, &str)]) {
    for release in RELEASES {
        let Some(bench) = bench(release) else { continue };
        check(&bench, release, name, environment);
    }
}

fn check(bench: &Bench, release: &str, name: &str, environment: &[(&str, &str)]) {
    let path = root().join("tests/standin").join(name);
    let output = bench.run(&[&path.to_string_lossy()], environment);
    let text = words(&output);
    assert!(output.status.success() && text.contains(" passed, 0 failed"), "{name} on {release}:\n{text}");
}

#[test]
fn every_function_that_pytorch_needs_is_there() {
    for release in RELEASES {
        let Some(bench) = bench(release) else { continue };
        assert_eq!(bench.plan().missing, Vec::<String>::new(), "{release}");
    }
}

#[test]
fn memory_is_what_pytorch_sees() {
    script("memory.py", &[]);
}

#[test]
fn values_that_programs_branch_on_are_sane() {
    script("values.py", &[]);
}

#[test]
fn streams_and_graphs_follow_the_rules() {
    script("streams.py", &[]);
}

#[test]
fn operators_and_libraries_run() {
    script("operators.py", &[]);
}

#[test]
fn several_devices_of_another_kind() {
    script("devices.py", &[("UNHAND_STANDIN_DEVICES", "2"), ("UNHAND_STANDIN_GPU", "t4")]);
}

#[test]
fn every_setting_of_the_allocator_works() {
    for settings in [
        "expandable_segments:False",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.6",
        "roundup_power2_divisions:4",
        "backend:cudaMallocAsync",
    ] {
        script("settings.py", &[("PYTORCH_CUDA_ALLOC_CONF", settings)]);
    }
}

#[test]
fn exit_codes_and_output_pass_through() {
    let Some(bench) = bench(RELEASES[0]) else { return };
    let output =
        bench.run(&["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"], &[]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
}

#[test]
fn without_devices_pytorch_says_so() {
    let Some(bench) = bench(RELEASES[0]) else { return };
    let program = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())";
    let output = bench.run(&["-c", program], &[("UNHAND_STANDIN_DEVICES", "0")]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "False 0\n", "{}", words(&output));
}
