//! Files that are not what they should be: each is named, with the cause and something to do about it.

use std::io::Write;
use std::process::Stdio;

use insta::assert_snapshot;

use crate::run::{describe, pickle_of, recording, run, run_in, unhand};

/// Writes `bytes` to a file of its own folder, and explains it.
fn explain(name: &str, bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs_err::write(&path, bytes).expect("written");
    run_in(folder.path(), &["explain", path.to_str().expect("UTF-8")])
}

#[test]
fn a_missing_file() {
    assert_snapshot!(run(&["explain", "nowhere.pickle"]), @r#"
    exit code: 3
    ----- stdout
    ----- stderr
    error: cannot read: `nowhere.pickle`
      caused by: No such file or directory (os error 2)

    hint: record one with `torch.cuda.memory._dump_snapshot("snapshot.pickle")`, or check the path
    "#);
}

#[test]
fn a_file_that_is_no_pickle() {
    assert_snapshot!(explain("notes.pickle", b"Dear diary,\nthe run failed again.\n"), @r#"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `[FOLDER]/notes.pickle`
      caused by: not a pickle of protocol 2 to 5, it looks like something else

    hint: a snapshot is what `torch.cuda.memory._dump_snapshot("snapshot.pickle")` writes;
    docs/guides/recording.md shows how to record one
    "#);
}

#[test]
fn an_empty_file() {
    assert_snapshot!(explain("empty.pickle", b""), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: the file is empty: `[FOLDER]/empty.pickle`

    hint: the program may have ended before it had written the snapshot
    ");
}

#[test]
fn a_pickle_of_something_else() {
    // `pickle.dumps([1, 2], protocol=4)`
    let bytes = b"\x80\x04\x95\x09\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01K\x02e.";
    assert_snapshot!(explain("list.pickle", bytes), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `[FOLDER]/list.pickle`
      caused by: `the list[0]` should be a dict
    ");
}

#[test]
fn a_hostile_pickle_runs_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("it-ran");
    // `os.system("touch …")`, in the protocols of Python 2 and of Python 3.
    let command = format!("touch {}", trace.display());
    let old = format!("cos\nsystem\n(S'{command}'\ntR.");
    let mut new = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c".to_vec();
    new.push(u8::try_from(command.len()).expect("a short path"));
    new.extend_from_slice(command.as_bytes());
    new.extend_from_slice(b"\x94\x85\x94R\x94.");

    assert_snapshot!(explain("old.pickle", old.as_bytes()), @r#"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `[FOLDER]/old.pickle`
      caused by: not a pickle of protocol 2 to 5, it looks like something else

    hint: a snapshot is what `torch.cuda.memory._dump_snapshot("snapshot.pickle")` writes;
    docs/guides/recording.md shows how to record one
    "#);
    assert_snapshot!(explain("new.pickle", &new), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `[FOLDER]/new.pickle`
      caused by: opcode `STACK_GLOBAL` at byte 16 asks for code to be run: `os.system`

    hint: a snapshot holds data and nothing to run, and unhand ran nothing; do not open this file with
    Python's `pickle`, which would
    ");
    assert!(!trace.exists(), "the pickle was executed");
}

#[test]
fn a_pickle_cut_short() {
    let pickle = pickle_of("gpt2.default");
    assert_snapshot!(explain("cut.pickle", &pickle[..pickle.len() / 2]), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `[FOLDER]/cut.pickle`
      caused by: the data ends at byte 1412008, inside the pickle

    hint: the file was cut short while it was written or copied; copy it again, or pass `--partial` to use
    what there is
    ");
}

#[test]
fn a_compressed_file_cut_short() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(recording("gpt2.default"));
    let packed = fs_err::read(path).expect("the recording is there");
    assert_snapshot!(explain("cut.pickle.xz", &packed[..packed.len() / 2]), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: cannot decompress: `[FOLDER]/cut.pickle.xz`
      caused by: bad xz data: failed to fill whole buffer

    hint: the file may have been cut short while it was copied; copy it again, or pass `--partial` to use what
    there is
    ");
}

/// A recording cut short still says something, if asked.
#[test]
fn a_part_is_better_than_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cut.pickle");
    let pickle = pickle_of("gpt2.default");
    fs_err::write(&path, &pickle[..pickle.len() / 2]).expect("written");
    let description = run_in(folder.path(), &["explain", "--partial", path.to_str().expect("UTF-8")]);
    assert!(description.starts_with("exit code: 0\n"), "{description}");
    let warning = "warning: `[FOLDER]/cut.pickle`: the file is cut off at byte 1412008";
    assert!(description.contains(warning), "{description}");
}

#[test]
fn a_folder_without_snapshots() {
    assert_snapshot!(run(&["explain", "docs"]), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: no snapshot in the folder: `docs`

    hint: snapshots are called `*.pickle` or `*.pkl`, with `.gz`, `.xz` or `.zst` if compressed
    ");
}

#[test]
fn broken_stdin() {
    let mut child = unhand(&["explain", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(b"not a snapshot").expect("read by the command");
    drop(stdin);
    assert_snapshot!(describe(&child.wait_with_output().expect("it ends")), @r#"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `stdin`
      caused by: not a pickle of protocol 2 to 5, it looks like something else

    hint: a snapshot is what `torch.cuda.memory._dump_snapshot("snapshot.pickle")` writes;
    docs/guides/recording.md shows how to record one
    "#);
}

#[test]
fn one_broken_file_among_good_ones() {
    assert_snapshot!(run(&["explain", &recording("gpt2.default"), "README.md"]), @r#"
    exit code: 3
    ----- stdout
    ----- stderr
    error: not a snapshot that can be read: `README.md`
      caused by: not a pickle of protocol 2 to 5, it looks like something else

    hint: a snapshot is what `torch.cuda.memory._dump_snapshot("snapshot.pickle")` writes;
    docs/guides/recording.md shows how to record one
    "#);
}

/// Every prefix of a snapshot is refused in words; none makes the command crash.
#[test]
fn every_cut_is_refused_in_words() {
    let pickle = pickle_of("streams.default");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cut.pickle");
    for n in 0..24 {
        fs_err::write(&path, &pickle[..pickle.len() * n / 24]).expect("written");
        let output = unhand(&["explain", path.to_str().expect("UTF-8")]).output().expect("it runs");
        let description = describe(&output);
        assert_eq!(output.status.code(), Some(3), "{description}");
        assert!(description.contains("error: "), "{description}");
    }
}

/// Names come from whoever made the file; they cannot clear the screen or worse.
#[test]
fn names_do_not_control_the_terminal() {
    let mut pickle = pickle_of("leak.stacks");
    let (name, evil) = (b"record.py", b"re\x1b[2J.py");
    let places: Vec<usize> =
        pickle.windows(name.len()).enumerate().filter(|(_, part)| part == name).map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    for at in places {
        pickle[at..at + evil.len()].copy_from_slice(evil);
    }
    let description = explain("evil.pickle", &pickle);
    assert!(description.contains("re\u{fffd}[2J.py") && !description.contains('\x1b'), "{description}");
}
