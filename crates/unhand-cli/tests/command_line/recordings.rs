//! `unhand run` as far as the command itself goes, and `unhand explain` on what the flight recorder wrote.

use std::path::Path;

use insta::assert_snapshot;

use crate::run::{describe, json_of, recording, run, unhand};

#[test]
fn run_says_how_it_is_used() {
    assert_snapshot!(run(&["run", "--help"]), @"
    exit code: 0
    ----- stdout
    Run a Python program; if it runs out of GPU memory, write down why

    Usage: unhand run [OPTIONS] SCRIPT [ARGS]...
           unhand run [OPTIONS] -m MODULE [ARGS]...

    Arguments:
      <SCRIPT>...
              The script, a folder or archive with a `__main__.py`, or `-m MODULE`; then its own
              arguments

    Options:
          --recordings <DIR>
              The folder for recordings; each gets a folder of its own in it

              [default: unhand-oom]

          --history <WHAT>
              What to record of every allocation

              Possible values:
              - stacks: Sizes and times, with the Python stack of each allocation
              - events: Sizes and times
              - off:    Nothing: what the program itself records is used

              [default: stacks]

          --max-entries <N>
              How many allocations and frees are kept, the newest

              [default: 100000]

          --limit <N>
              How many out-of-memory errors are recorded, the first ones

              [default: 1]

          --json
              Answer as JSON: sizes in bytes, and a `schema_version`

          --partial
              Use what there is of a file that was cut short

          --color <WHEN>
              When to use colours; `auto` looks at the terminal and at `NO_COLOR`

              [default: auto]
              [possible values: auto, always, never]

      -h, --help
              Print help (see a summary with '-h')

    Examples:
      unhand run train.py --epochs 3                    options of unhand stand before the script
      unhand run --recordings oom -m my.module          as `python -m my.module`
      torchrun --nproc-per-node 8 -m unhand run train.py
      unhand explain unhand-oom/                        what it says, and which rank was different

    The program runs as with `python`: its arguments, exit code, tracebacks and signals are its own. At
    its first out-of-memory error a folder is written: report.txt, report.json and snapshot.pickle.
    ----- stderr
    ");
    assert_snapshot!(run(&["run"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: the following required arguments were not provided:
      <SCRIPT>...

    Usage: unhand run [OPTIONS] SCRIPT [ARGS]...
           unhand run [OPTIONS] -m MODULE [ARGS]...

    For more information, try '--help'.
    ");
}

#[test]
fn options_of_run_are_told_from_those_of_the_program() {
    assert_snapshot!(run(&["run", "--recordngs", "oom", "train.py"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: unexpected argument: `--recordngs`

    hint: options of `unhand run` are listed by `unhand run --help`
    ");
    assert_snapshot!(run(&["run", "-m"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: `-m` needs the name of a module
    ");
    assert_snapshot!(run(&["run", "--history", "all", "train.py"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: invalid value 'all' for '--history <WHAT>'
      [possible values: stacks, events, off]

    For more information, try '--help'.
    ");
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
    assert_snapshot!(of(&["run", "train.py"]), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: cannot start: `python3`
      caused by: No such file or directory (os error 2)

    hint: `unhand run` needs Python with the package: `pip install unhand`
    ");
    let python = folder.path().join("python3");
    fs_err::write(&python, "#!/bin/sh\necho \"$@\"\nexit 7\n").expect("written");
    fs_err::set_permissions(&python, PermissionsExt::from_mode(0o755)).expect("allowed");
    assert_snapshot!(of(&["--color", "never", "run", "--limit", "2", "train.py", "--limit", "x"]), @"
    exit code: 7
    ----- stdout
    -m unhand --color never run --limit 2 train.py --limit x
    ----- stderr
    ");
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
        let report = format!(
            "{{\"rank\": {rank}, \"inputs\": [{{\"name\": \"tokens\", \"shape\": [{batch}, 512]}}]}}"
        );
        fs_err::write(place.join("report.json"), report).expect("written");
    }
    // One that was not finished.
    fs_err::create_dir_all(folder.join("20260102-000000-88/.rank3.9-9.part")).expect("created");
}

#[test]
fn a_folder_of_recordings_is_its_newest_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let all = folder.path().join("oom");
    ranks(&all);
    let all = all.display().to_string();
    let output = unhand(&["explain", "oom"]).current_dir(folder.path()).output();
    assert_snapshot!(describe(&output.expect("the binary was built for this test")), @"
    exit code: 0
    ----- stdout
                                                      peak need   peak res.  end alloc.    end res.
    oom/20260102-000000-88/rank0/snapshot.pickle.xz    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    oom/20260102-000000-88/rank1/snapshot.pickle.xz    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    oom/20260102-000000-88/rank2/snapshot.pickle.xz     6.9 GiB     6.9 GiB     6.4 GiB     6.9 GiB
    oom/20260102-000000-88/rank2/snapshot.pickle.xz reserved at most 6.9 GiB: 9.7 GiB less than the median of 16.5 GiB (58% of it).
    oom/20260102-000000-88/rank2/snapshot.pickle.xz needed at most 6.9 GiB: 7.5 GiB less than the median of 14.4 GiB (52% of it).
    oom/20260102-000000-88/rank2/snapshot.pickle.xz still holds 6.4 GiB: 5.0 GiB more than the median of 1.5 GiB (342% of it).
    oom/20260102-000000-88/rank2/snapshot.pickle.xz grows in every repetition by 144.0 MiB: 144.0 MiB more than the median of 0 B.

    Rank 2 is different: it reserved 6.9 GiB at most where the others reserved 16.5 GiB. The difference
    is at record.py:40, activations: 5.5 GiB instead of 0 B. Then at transformers/activations.py:66,
    activations: 0 B instead of 4.4 GiB. Then at (no Python frames), backward (gradients or
    temporaries): 0 B instead of 3.0 GiB. Its `tokens` is of shape [16, 512] where the others have [8,
    512].
    ----- stderr
    ");
    let answer = json_of(&["explain", "--json", &format!("{all}/20260102-000000-88")]);
    assert_eq!(answer["comparison"]["different"]["row"], 2);
    assert_eq!(answer["explanations"].as_array().map(Vec::len), Some(3));
    let one = json_of(&["explain", "--json", &format!("{all}/20260101-000000-77")]);
    assert_eq!(one["explanations"].as_array().map(Vec::len), Some(1));
    assert!(one["comparison"].is_null());
}
