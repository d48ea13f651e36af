//! What the commands answer about the recordings: as text, as JSON, into files, from other forms of input.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::Stdio;

use insta::assert_snapshot;

use crate::run::{describe, json_of, pickle_of, recording, run, run_in, stdout_of, unhand};

#[test]
fn explain_one_recording() {
    assert_snapshot!(run(&["explain", &recording("leak.stacks"), "--limit", "2"]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/leak.stacks.pickle.xz, device 0
    14,776 events over 5.0 s, 40 steps, with stacks

    Peaks
      requested  6.9 GiB  after 4.8 s, in step 40, during Optimizer.step#Adam.step
      allocated  6.9 GiB  after 4.8 s, in step 40, during Optimizer.step#Adam.step
      reserved   6.9 GiB  after 4.8 s

    Leak suspects
      Each repetition of record.py:40 leaves 49 blocks, 144.0 MiB; 40 repetitions so far: 5.6 GiB. They
      are activations.

    At the peak
      After 4.8 s, in step 40, during Optimizer.step#Adam.step, 6.9 GiB were held by 2,101 blocks:
      activations 80%, optimizer state 7%, parameters 4%, gradients 4%, temporaries of the optimizer
      step 4%, library workspaces 1%, unknown 1%.
        5.5 GiB   80%  1,858 blocks  activations      record.py:40 (leak)
      512.3 MiB    7%     64 blocks  optimizer state  record.py:40 (leak)
      872.5 MiB  in 6 more holders

    At the end
      Of 6.9 GiB reserved, 6.4 GiB are still allocated in 2,060 blocks: activations 87%, optimizer state
      8%, parameters 4%, library workspaces 1%, unknown 1%.
        5.6 GiB       760 ms  1,881 blocks  activations      record.py:40 (leak)
      512.3 MiB       516 ms     64 blocks  optimizer state  record.py:40 (leak)
      360.2 MiB  in 4 more holders
      (second column: the age of the oldest block)

    Cached
      450.5 MiB are reserved but hold no block: torch.cuda.empty_cache() would return 450.0 MiB,
      523.5 KiB are stuck beside live blocks.
    ----- stderr
    ");
}

#[test]
fn explain_several_and_the_odd_one_out() {
    let files = ["gpt2.default", "gpt2.round4", "gpt2.stacks", "gpt2.split64"].map(recording);
    let [a, b, c, d] = files.each_ref().map(String::as_str);
    assert_snapshot!(run(&["explain", a, b, c, d]), @"
    exit code: 0
    ----- stdout
                                             peak need   peak res.  end alloc.    end res.
    tests/snapshots/gpt2.default.pickle.xz    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    tests/snapshots/gpt2.round4.pickle.xz     14.4 GiB    17.0 GiB     1.6 GiB    17.0 GiB
    tests/snapshots/gpt2.stacks.pickle.xz     14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    tests/snapshots/gpt2.split64.pickle.xz    14.4 GiB    28.3 GiB     1.5 GiB    28.3 GiB
    tests/snapshots/gpt2.split64.pickle.xz reserved at most 28.3 GiB: 11.7 GiB more than the median of 16.5 GiB (71% of it).
    tests/snapshots/gpt2.round4.pickle.xz still holds 1.6 GiB: 144.6 MiB more than the median of 1.5 GiB (10% of it).

    tests/snapshots/gpt2.split64.pickle.xz is different: it reserved 28.3 GiB at most where the others
    reserved 16.5 GiB.
    ----- stderr
    ");
    let answer = json_of(&["explain", "--json", a, b, c, d]);
    assert_eq!(answer["explanations"].as_array().map(Vec::len), Some(4));
    assert_eq!(answer["comparison"]["odd"][0]["row"], 3);
}

#[test]
fn explain_fails_on_what_it_was_told_to_look_for() {
    let code = |name: &str, what: &str| {
        let output = unhand(&["explain", &recording(name), "--fail-on", what]).output().expect("it runs");
        output.status.code()
    };
    assert_eq!(code("leak.stacks", "leak"), Some(1));
    assert_eq!(code("leak.stacks", "oom,leak"), Some(1));
    assert_eq!(code("leak.stacks", "oom"), Some(0));
    assert_eq!(code("gpt2.stacks", "leak,oom"), Some(0));
}

/// Compressed or not, by path or through a pipe: the answer is the same.
#[test]
fn the_form_of_the_input_makes_no_difference() {
    let expected = stdout_of(&["explain", &recording("streams.default")]);
    let expected = expected.lines().skip(1).collect::<Vec<_>>();
    let pickle = pickle_of("streams.default");

    let mut child = unhand(&["explain", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    child.stdin.take().expect("piped").write_all(&pickle).expect("read by the command");
    let output = child.wait_with_output().expect("it ends");
    let through_pipe = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(through_pipe.lines().next(), Some("stdin, device 0"));
    assert_eq!(through_pipe.lines().skip(1).collect::<Vec<_>>(), expected);

    let folder = tempfile::tempdir().expect("a folder");
    // The contents decide, not the name.
    let path = folder.path().join("snapshot.bin");
    fs_err::write(&path, &pickle).expect("written");
    let by_path = stdout_of(&["explain", path.to_str().expect("UTF-8")]);
    assert_eq!(by_path.lines().skip(1).collect::<Vec<_>>(), expected);
}

#[test]
fn colours_come_when_asked_for() {
    let file = recording("streams.default");
    let is_colored = |arguments: &[&str], variable: Option<(&str, &str)>| {
        let output = unhand(arguments).envs(variable).output().expect("it runs");
        output.stdout.contains(&b'\x1b')
    };
    assert!(!is_colored(&["explain", &file], None));
    assert!(is_colored(&["explain", &file, "--color", "always"], None));
    assert!(is_colored(&["explain", &file, "--color", "always"], Some(("NO_COLOR", "1"))));
    assert!(!is_colored(&["explain", &file, "--color", "never"], Some(("CLICOLOR_FORCE", "1"))));
}

#[test]
fn diff_of_a_file_with_itself() {
    let file = recording("streams.default");
    assert_snapshot!(run(&["diff", &file, &file]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/streams.default.pickle.xz, device 0  ->  tests/snapshots/streams.default.pickle.xz, device 0

    Nothing differs.
    ----- stderr
    ");
}

#[test]
fn diff_as_json() {
    let answer = json_of(&["diff", "--json", &recording("gpt2.default"), &recording("gpt2.exp")]);
    assert_eq!(answer["schema_version"], 1);
    assert_eq!(answer["settings"][0]["key"], "expandable_segments");
}

#[test]
fn replay_under_other_settings() {
    let file = recording("gpt2.split64");
    assert_snapshot!(run(&["replay", &file, "--set", "expandable_segments=True"]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/gpt2.split64.pickle.xz, device 0
    38,524 events, rules of torch 2.11

    Peaks
      requested  allocated  reserved    change  segments  driver calls  settings
       14.4 GiB   14.4 GiB  28.3 GiB                 337           337  (recorded) max_split_size_mb:64
       14.4 GiB   14.4 GiB  21.3 GiB  -6.9 GiB         2           452  max_split_size_mb:64,expandable_segments:True

    The recorded run is repeated exactly: all 337 driver calls, in order and size.
    ----- stderr
    ");
}

#[test]
fn replay_of_a_sweep() {
    assert_snapshot!(run(&["replay", &recording("streams.default"), "--sweep"]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/streams.default.pickle.xz, device 0
    2,516 events, rules of torch 2.11

    Peaks
      requested  allocated   reserved     change  segments  driver calls  settings
      479.7 MiB  483.0 MiB  608.0 MiB                   37            83  (recorded)
      479.7 MiB  479.8 MiB  558.0 MiB  -50.0 MiB        12            77  expandable_segments:True,large_segment_size_mb:11
      479.7 MiB  479.8 MiB  608.0 MiB        0 B        10            53  expandable_segments:True
      479.7 MiB  487.7 MiB  608.0 MiB        0 B        10            56  expandable_segments:True,roundup_power2_divisions:16
      479.7 MiB  483.0 MiB  608.0 MiB        0 B        37            83  max_split_size_mb:32
      479.7 MiB  483.0 MiB  608.0 MiB        0 B        37            83  max_split_size_mb:64
      479.7 MiB  483.0 MiB  608.0 MiB        0 B        37            83  max_split_size_mb:128
      479.7 MiB  483.0 MiB  608.0 MiB        0 B        37            83  max_split_size_mb:256
      479.7 MiB  483.0 MiB  608.0 MiB        0 B        37            83  max_split_size_mb:512
      479.7 MiB  495.1 MiB  620.0 MiB  +12.0 MiB        38            84  roundup_power2_divisions:16
      479.7 MiB  504.0 MiB  624.0 MiB  +16.0 MiB        39            89  roundup_power2_divisions:8
      479.7 MiB  522.7 MiB  636.0 MiB  +28.0 MiB        42            90  roundup_power2_divisions:4
      479.7 MiB  496.1 MiB  648.0 MiB  +40.0 MiB        12            58  expandable_segments:True,roundup_power2_divisions:8
      479.7 MiB  482.5 MiB  698.0 MiB  +90.0 MiB        21            53  large_segment_size_mb:64

    The recorded run is repeated exactly: all 83 driver calls, in order and size.
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,large_segment_size_mb:11 would have reserved
    558.0 MiB at its peak: 50.0 MiB (8% of the recorded peak) less.
    ----- stderr
    ");
}

#[test]
fn replay_on_a_smaller_device() {
    assert_snapshot!(run(&["replay", &recording("gpt2.default"), "--memory", "16GiB"]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/gpt2.default.pickle.xz, device 0
    38,413 events, rules of torch 2.11

    Peaks
      requested  allocated  reserved      change  segments  driver calls  settings
       14.4 GiB   14.4 GiB  16.5 GiB                   226           226  (recorded)
       14.4 GiB   14.4 GiB  15.8 GiB  -788.0 MiB       200           272  (defaults) in 16.0 GiB

    The recorded run is repeated exactly: all 226 driver calls, in order and size.
    (defaults) in 16.0 GiB: fits, with 15.8 GiB of 16.0 GiB reserved at most.
    ----- stderr
    ");
    assert_snapshot!(run(&["replay", &recording("gpt2.default"), "--memory", "12GiB"]), @"
    exit code: 0
    ----- stdout
    tests/snapshots/gpt2.default.pickle.xz, device 0
    38,413 events, rules of torch 2.11

    Peaks
      requested  allocated  reserved    change  segments  driver calls  ooms  settings
       14.4 GiB   14.4 GiB  16.5 GiB                 226           226     0  (recorded)
        9.9 GiB   10.0 GiB  12.0 GiB  -4.6 GiB       185           261     1  (defaults) in 12.0 GiB

    The recorded run is repeated exactly: all 226 driver calls, in order and size.
    (defaults) in 12.0 GiB: memory runs out at event 32,590. 1.5 GiB are asked for; 9.9 GiB are
    allocated and 11.2 GiB reserved of 12.0 GiB. The figures are those up to there.
    ----- stderr
    ");
}

/// Other tools read this; a field may be added, none may change.
#[test]
fn the_json_of_a_replay() {
    let arguments = ["replay", "--json", &recording("streams.default"), "--set", "max_split_size_mb:64"];
    assert_snapshot!(run(&arguments), @r#"
    exit code: 0
    ----- stdout
    {
      "schema_version": 1,
      "runs": [
        {
          "file": "tests/snapshots/streams.default.pickle.xz",
          "device": 0,
          "settings": "",
          "recorded": true,
          "peak": {
            "requested_bytes": 503039628,
            "allocated_bytes": 506449920,
            "reserved_bytes": 637534208
          },
          "end": {
            "requested_bytes": 487361972,
            "allocated_bytes": 490771968,
            "reserved_bytes": 637534208
          },
          "segments": 37,
          "driver_calls": {
            "alloc": 60,
            "free": 23,
            "map": 0,
            "unmap": 0
          },
          "ooms": 0,
          "events": 2516,
          "same_as_recorded": true,
          "first_difference": null
        },
        {
          "file": "tests/snapshots/streams.default.pickle.xz",
          "device": 0,
          "settings": "max_split_size_mb:64",
          "recorded": false,
          "peak": {
            "requested_bytes": 503039628,
            "allocated_bytes": 506449920,
            "reserved_bytes": 637534208
          },
          "end": {
            "requested_bytes": 487361972,
            "allocated_bytes": 490771968,
            "reserved_bytes": 637534208
          },
          "segments": 37,
          "driver_calls": {
            "alloc": 60,
            "free": 23,
            "map": 0,
            "unmap": 0
          },
          "ooms": 0,
          "events": 2516,
          "same_as_recorded": true,
          "first_difference": null
        }
      ]
    }
    ----- stderr
    "#);
}

#[test]
fn flame_in_all_forms() {
    let file = recording("leak.stacks");
    let folded = stdout_of(&["flame", &file, "--at", "end"]);
    let total: u64 = folded.lines().filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
    let explained = json_of(&["explain", "--json", &file]);
    assert_eq!(explained["explanations"][0]["end"]["requested_bytes"], total);

    let speedscope: serde_json::Value =
        serde_json::from_str(&stdout_of(&["flame", &file, "--at", "end", "--format", "speedscope"]))
            .expect("JSON");
    assert_eq!(speedscope["profiles"][0]["endValue"], total);
    assert_eq!(speedscope["profiles"][0]["unit"], "bytes");

    let svg = stdout_of(&["flame", &file, "--format", "svg"]);
    assert!(svg.starts_with("<?xml") && svg.contains("record.py"), "{}", &svg[..200]);
}

#[test]
fn tables_begin_with_their_columns() {
    let mut heads = String::new();
    for what in ["events", "segments", "blocks"] {
        let table = stdout_of(&["export", &recording("streams.default"), "--to", "csv", "--what", what]);
        let _ = writeln!(heads, "{what}: {} rows", table.lines().count() - 1);
        for line in table.lines().take(2) {
            let _ = writeln!(heads, "  {line}");
        }
    }
    assert_snapshot!(heads, @"
    events: 2516 rows
      device,index,action,address,size_bytes,device_free_bytes,stream,time_us,pool_a,pool_b,site,category,stack,compile_context,user_metadata
      0,0,segment_alloc,140280315510784,14680064,,169043536,1796099673672529,,,,,,N/A,
    segments: 37 rows
      device,address,total_bytes,allocated_bytes,active_bytes,requested_bytes,stream,kind,pool_a,pool_b,is_expandable,blocks
      0,140279235477504,20971520,11658752,11658752,11658018,0,large,0,1,false,3
    blocks: 113 rows
      device,segment_address,address,size_bytes,requested_bytes,state,site,category,stack
      0,140279235477504,140279235477504,5501440,5500993,active_allocated,,,
    ");
}

#[test]
fn json_lines_have_as_many_rows() {
    let file = recording("streams.default");
    let csv = stdout_of(&["export", &file, "--to", "csv"]);
    let lines = stdout_of(&["export", &file, "--json"]);
    assert_eq!(csv.lines().count() - 1, lines.lines().count());
    for line in lines.lines() {
        serde_json::from_str::<serde_json::Value>(line).expect("each line is JSON");
    }
}

#[test]
fn an_output_file_is_complete_or_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("blocks.csv");
    let path = path.to_str().expect("UTF-8");
    let file = recording("streams.default");
    let arguments = ["export", &file, "--to", "csv", "--what", "blocks", "-o", path];
    assert_snapshot!(run_in(folder.path(), &arguments), @"
    exit code: 0
    ----- stdout
    ----- stderr
    ");
    let written = fs_err::read_to_string(path).expect("it is there");
    assert_eq!(written, stdout_of(&["export", &file, "--to", "csv", "--what", "blocks"]));

    // Not over a file that is there, and nothing at all when the question has no answer.
    assert_snapshot!(run_in(folder.path(), &arguments), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: the file is already there: `[FOLDER]/blocks.csv`

    hint: choose another name, or pass `--force` to replace it
    ");
    let missing = folder.path().join("missing.csv");
    let arguments = ["export", &file, "--to", "csv", "--device", "7", "-o", missing.to_str().expect("UTF-8")];
    assert_snapshot!(run_in(folder.path(), &arguments), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: no answer about `tests/snapshots/streams.default.pickle.xz`
      caused by: the snapshot has no device: `7` (it has 0)
    ");
    let names: Vec<_> = fs_err::read_dir(folder.path())
        .expect("readable")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8"))
        .collect();
    assert_eq!(names, ["blocks.csv"]);
}

#[test]
fn a_folder_that_is_not_there_cannot_be_written_to() {
    let file = recording("streams.default");
    let arguments = ["flame", &file, "-o", "no/such/folder/peak.txt"];
    assert_snapshot!(describe(&unhand(&arguments).output().expect("it runs")), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: cannot write: `no/such/folder/peak.txt`
      caused by: No such file or directory (os error 2)
    ");
}

/// Ctrl-C while a file is written: it is complete or not there, and no part of it stays.
#[test]
fn an_interrupted_export_leaves_no_part() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let names = || {
        let entries = fs_err::read_dir(folder.path()).expect("readable");
        entries.map(|entry| entry.expect("readable").file_name()).collect::<Vec<_>>()
    };
    let arguments = ["export", &recording("churn.default"), "--json", "-o", path.to_str().expect("UTF-8")];
    let mut child = unhand(&arguments).spawn().expect("the binary was built for this test");
    while names().is_empty() && child.try_wait().expect("it can be asked").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    std::process::Command::new("kill").args(["-INT", &pid]).status().expect("there is `kill`");
    let code = child.wait().expect("it ends").code();
    // A fast machine may have finished before the signal came.
    let expected =
        if code == Some(0) { vec!["events.jsonl".into()] } else { Vec::<std::ffi::OsString>::new() };
    assert_eq!(names(), expected, "exit code {code:?}");
    assert!(matches!(code, Some(0 | 130)), "{code:?}");
}
