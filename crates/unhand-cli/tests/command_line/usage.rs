//! The command line itself: help, misuse, and a reader who goes away.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use insta::assert_snapshot;

use crate::run::{recording, run, stdout_of, unhand};

#[test]
fn help_of_the_command() {
    assert_snapshot!(run(&["--help"]), @"
    exit code: 0
    ----- stdout
    See what holds your GPU memory, make it let go, keep it free

    Usage: unhand [OPTIONS] <COMMAND>

    Commands:
      explain   Say what held the memory at the peak and at the end, what pins the cache, and what leaks
      replay    Replay the recorded run through PyTorch's allocation rules, as it was and under other
                settings
      diff      Compare two snapshots: totals, and the call sites that hold more or less
      flame     Show bytes by call stack as a flame graph
      export    Write the events, segments or blocks of a snapshot as a table
      run       Run a Python program; if it runs out of GPU memory, write down why
      doctor    Say what this machine allows PyTorch to do with its GPUs, and what to do about the rest
      dry-run   Say what a script would need on a GPU, who holds it, and where it fits, without having
                one
      stand-in  Run a command with the real PyTorch on a GPU that is not there

    Options:
          --json          Answer as JSON: sizes in bytes, and a `schema_version`
          --partial       Use what there is of a file that was cut short
          --color <WHEN>  When to use colours; `auto` looks at the terminal and at `NO_COLOR` [default:
                          auto] [possible values: auto, always, never]
      -h, --help          Print help
      -V, --version       Print version

    Examples:
      unhand explain snapshot.pickle             what held the memory, and what to do about it
      unhand replay snapshot.pickle --sweep      which allocator settings would have needed less
      unhand diff before.pickle after.pickle     what one run holds that the other does not
      unhand run train.py                        a run that writes down why it ran out of memory
      unhand doctor                              what this machine allows, and what to do about the rest

    FILE is a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), as it is or
    as .gz, .xz or .zst; a folder stands for all snapshots in it, and - for stdin. Nothing
    in a file is ever executed.

    Exit codes: 0 fine, 1 found what you asked to be told about, 2 bad use, 3 bad input.
    ----- stderr
    ");
}

#[test]
fn help_of_explain() {
    assert_snapshot!(run(&["explain", "--help"]), @"
    exit code: 0
    ----- stdout
    Say what held the memory at the peak and at the end, what pins the cache, and what leaks

    Usage: unhand explain [OPTIONS] <FILE>...

    Arguments:
      <FILE>...
              Snapshots, folders of snapshots, or `-` for stdin

    Options:
          --stacks
              Show whole call stacks instead of the line that matters

          --limit <N>
              How many holders, leaks and pins to show

              [default: 10]

          --device <INDEX>
              Answer for this device only

          --fail-on <WHAT>
              Exit with code 1 if this is found

              Possible values:
              - leak: Memory that grows from step to step and is not given back
              - oom:  An out-of-memory error in the recording

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
      unhand explain snapshot.pickle
      unhand explain --stacks --limit 3 snapshot.pickle     the whole call stacks of the three largest
      unhand explain snapshots/                             one row for each rank, and the odd one out
      unhand explain --fail-on leak,oom snapshot.pickle     for CI: exit code 1 if it leaks or ran out
    ----- stderr
    ");
}

#[test]
fn help_of_replay() {
    assert_snapshot!(run(&["replay", "--help"]), @"
    exit code: 0
    ----- stdout
    Replay the recorded run through PyTorch's allocation rules, as it was and under other settings

    Usage: unhand replay [OPTIONS] <FILE>...

    Arguments:
      <FILE>...  Snapshots, folders of snapshots, or `-` for stdin

    Options:
          --set <KEY=VALUE>  A setting to try, as in `PYTORCH_CUDA_ALLOC_CONF`; several are tried
                             together
          --sweep            Try a dozen common settings, each in a run of its own
          --memory <BYTES>   The memory of the device, e.g. `24GiB`; without it memory never runs out
          --torch <2.N>      Follow the rules of this PyTorch release instead of the one the recording
                             shows
          --device <INDEX>   Replay this device only
          --json             Answer as JSON: sizes in bytes, and a `schema_version`
          --partial          Use what there is of a file that was cut short
          --color <WHEN>     When to use colours; `auto` looks at the terminal and at `NO_COLOR`
                             [default: auto] [possible values: auto, always, never]
      -h, --help             Print help

    Examples:
      unhand replay snapshot.pickle --set expandable_segments=True
      unhand replay snapshot.pickle --set max_split_size_mb=64 --set garbage_collection_threshold=0.8
      unhand replay snapshot.pickle --sweep                 a dozen common settings, best first
      unhand replay snapshot.pickle --memory 24GiB          would it have fitted a smaller GPU?

    The first run is always the recorded one, and says whether the replay repeats it exactly.
    ----- stderr
    ");
}

#[test]
fn help_of_doctor() {
    assert_snapshot!(run(&["doctor", "--help"]), @"
    exit code: 0
    ----- stdout
    Say what this machine allows PyTorch to do with its GPUs, and what to do about the rest

    Usage: unhand doctor [OPTIONS]

    Options:
          --python <PATH>  The Python interpreter to ask about PyTorch [default: the one unhand is
                           installed for, or `python3`]
          --json           Answer as JSON: sizes in bytes, and a `schema_version`
          --partial        Use what there is of a file that was cut short
          --color <WHEN>   When to use colours; `auto` looks at the terminal and at `NO_COLOR` [default:
                           auto] [possible values: auto, always, never]
      -h, --help           Print help

    Examples:
      unhand doctor
      unhand doctor --python .venv/bin/python     the interpreter that runs your programs
      CUDA_VISIBLE_DEVICES=1 unhand doctor        which device would be cuda:0?

    Looks at the driver, the devices and who uses them, containers and WSL, PyTorch (found by
    its files, never imported), and the variables that change what happens to memory. Makes no
    CUDA context and takes no GPU memory.

    Exit code 1 if there is a problem: PyTorch cannot use a GPU like this.
    ----- stderr
    ");
}

/// What it says depends on the machine; that it says something does not.
#[test]
fn the_doctor_answers_on_every_machine() {
    for arguments in [&["doctor", "--json"][..], &["doctor", "--json", "--python", "python-of-nobody"]] {
        let output = unhand(arguments).output().expect("the binary was built for this test");
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("the answer is JSON");
        let findings = answer["findings"].as_array().expect("a list");
        let has_problem = findings.iter().any(|finding| finding["level"] == "problem");
        assert_eq!(output.status.code(), Some(i32::from(has_problem)), "{answer}");
        let topics: Vec<&str> = findings.iter().filter_map(|finding| finding["topic"].as_str()).collect();
        assert!(["driver", "python", "settings"].iter().all(|topic| topics.contains(topic)), "{topics:?}");
    }
    let text = run(&["doctor", "--python", "python-of-nobody"]);
    assert!(text.contains("Python does not answer: `python-of-nobody`: No such file or directory"), "{text}");
}

#[test]
fn every_command_has_examples() {
    for command in ["explain", "replay", "diff", "flame", "export", "doctor"] {
        let help = stdout_of(&[command, "--help"]);
        assert!(help.contains("Examples:\n"), "{help}");
        let widest = help.lines().max_by_key(|line| line.chars().count()).unwrap_or_default();
        assert!(widest.chars().count() <= 100, "too wide: {widest}");
    }
}

#[test]
fn nothing_asked() {
    assert_snapshot!(run(&["explain"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: the following required arguments were not provided:
      <FILE>...

    Usage: unhand explain <FILE>...

    For more information, try '--help'.
    ");
}

#[test]
fn an_unknown_command() {
    assert_snapshot!(run(&["explian", "a.pickle"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: unrecognized subcommand 'explian'

      tip: some similar subcommands exist: 'replay', 'explain'

    Usage: unhand [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
}

#[test]
fn a_setting_without_a_value() {
    assert_snapshot!(run(&["replay", "a.pickle", "--set", "expandable_segments"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: invalid value 'expandable_segments' for '--set <KEY=VALUE>': expected KEY=VALUE

    For more information, try '--help'.
    ");
}

#[test]
fn a_setting_nobody_knows() {
    let file = recording("streams.default");
    assert_snapshot!(run(&["replay", &file, "--set", "max_split_size=64"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: cannot use `--set`
      caused by: unrecognized key: `max_split_size`

    hint: did you mean `max_split_size_mb`?
    ");
    assert_snapshot!(run(&["replay", &file, "--set", "shoe_size=42"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: cannot use `--set`
      caused by: unrecognized key: `shoe_size`

    hint: the keys are backend, expandable_segments, expandable_segments_reserve,
    expandable_segments_reserve_by_class, garbage_collection_threshold,
    graph_capture_record_stream_reuse, large_segment_size_mb, max_non_split_rounding_mb,
    max_split_size_mb, per_process_memory_fraction, pinned_free_catch_all, pinned_max_cached_size_mb,
    pinned_max_round_threshold_mb, pinned_num_register_threads, pinned_reserve_segment_size_mb,
    pinned_use_background_threads, pinned_use_cuda_host_register, release_lock_on_cudamalloc,
    roundup_power2_divisions, throw_on_cudamalloc_oom
    ");
}

#[test]
fn a_setting_out_of_range() {
    assert_snapshot!(run(&["replay", &recording("streams.default"), "--set", "max_split_size_mb:1"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: cannot use `--set`
      caused by: bad value for `max_split_size_mb`: `1` (at least large_segment_size_mb, 20 by default)
    ");
}

#[test]
fn a_setting_newer_than_the_release() {
    let file = recording("streams.default");
    assert_snapshot!(run(&["replay", &file, "--torch", "2.9", "--set", "large_segment_size_mb=40"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: cannot use `--set`
      caused by: key `large_segment_size_mb` is not known to torch 2.9

    hint: name a newer release with `--torch`
    ");
}

#[test]
fn a_size_that_is_none() {
    assert_snapshot!(run(&["replay", "a.pickle", "--memory", "lots"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: invalid value 'lots' for '--memory <BYTES>': not a number of bytes: `lots` (it does not begin with a number)

    For more information, try '--help'.
    ");
}

#[test]
fn a_release_that_is_none() {
    assert_snapshot!(run(&["replay", "a.pickle", "--torch", "1.13"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: invalid value '1.13' for '--torch <2.N>': unknown torch release: `1.13` (known: 2.4 to 2.15)

    For more information, try '--help'.
    ");
}

#[test]
fn stdin_twice() {
    assert_snapshot!(run(&["explain", "-", "-"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: stdin can be read once, and `-` is there twice
    ");
}

#[test]
fn a_device_that_is_not_there() {
    assert_snapshot!(run(&["explain", &recording("streams.default"), "--device", "3"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: no answer about `tests/snapshots/streams.default.pickle.xz`
      caused by: the snapshot has no device: `3` (it has 0)
    ");
}

/// `unhand … | head` ends quietly, whatever the command still had to say.
#[test]
fn a_reader_who_goes_away() {
    let file = recording("gpt2.default");
    let mut child = unhand(&["export", &file, "--to", "csv"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("one line");
    assert!(line.ends_with('\n'), "{line}");
    // The reader is gone now, with most of the table unread.
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
