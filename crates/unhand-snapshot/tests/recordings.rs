//! Real recordings: what is read equals the statistics beside them and what Python reads.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{describe, recordings};
use unhand_snapshot::{Action, BlockState, ReadOptions, Snapshot, decompress};

fn read(path: &Path) -> (Vec<u8>, Snapshot) {
    let packed = std::fs::read(path).unwrap();
    let bytes = decompress(&packed).unwrap().into_owned();
    let snapshot = Snapshot::read(&bytes, &ReadOptions::default()).unwrap();
    (bytes, snapshot)
}

fn action_name(action: Action) -> &'static str {
    match action {
        Action::Alloc => "alloc",
        Action::FreeRequested => "free_requested",
        Action::FreeCompleted => "free_completed",
        Action::Free => "free",
        Action::SegmentAlloc => "segment_alloc",
        Action::SegmentFree => "segment_free",
        Action::SegmentMap => "segment_map",
        Action::SegmentUnmap => "segment_unmap",
        Action::Snapshot => "snapshot",
        Action::Oom => "oom",
        Action::Annotate => "annotate",
        Action::Other => "other",
    }
}

#[test]
fn counts_and_sums_equal_the_statistics() {
    for path in recordings() {
        let (_, snapshot) = read(&path);
        let name = path.display();
        let json = path.with_extension("").with_extension("json");
        let statistics: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let mut events: HashMap<&str, u64> = HashMap::new();
        for event in snapshot.traces.iter().flat_map(unhand_snapshot::Trace::iter) {
            *events.entry(action_name(event.action)).or_default() += 1;
        }
        for (action, count) in statistics["events"].as_object().unwrap() {
            assert_eq!(events.get(action.as_str()), count.as_u64().as_ref(), "{action} in {name}");
        }
        assert_eq!(events.len(), statistics["events"].as_object().unwrap().len(), "{name}");

        let stats = &statistics["stats"];
        let segments = &snapshot.segments;
        let total = |key: &str| stats[key].as_u64().unwrap();
        assert_eq!(
            segments.iter().map(|s| s.total_size).sum::<u64>(),
            total("reserved_bytes.all.current"),
            "{name}"
        );
        assert_eq!(
            segments.iter().map(|s| s.active_size).sum::<u64>(),
            total("active_bytes.all.current"),
            "{name}"
        );
        assert_eq!(
            segments.iter().map(|s| s.allocated_size).sum::<u64>(),
            total("allocated_bytes.all.current"),
            "{name}"
        );
        assert_eq!(
            segments.iter().map(|s| s.requested_size).sum::<u64>(),
            total("requested_bytes.all.current"),
            "{name}"
        );
        let blocks = || segments.iter().flat_map(|s| &s.blocks);
        let active = blocks().filter(|b| b.state != BlockState::Inactive).count() as u64;
        assert_eq!(active, total("active.all.current"), "{name}");
        assert_eq!(snapshot.settings.conf, statistics["conf"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn blocks_tile_their_segments() {
    for path in recordings() {
        let (_, snapshot) = read(&path);
        for segment in &snapshot.segments {
            let mut address = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, address, "{}", path.display());
                address += block.size;
            }
            assert_eq!(address, segment.address + segment.total_size, "{}", path.display());
        }
    }
}

#[test]
fn recordings_of_torch_2_11_are_recognised_without_warnings() {
    for path in recordings() {
        let (_, snapshot) = read(&path);
        let release = snapshot.release_guess();
        assert_eq!((release.min, release.max), (Some((2, 10)), Some((2, 11))), "{}", path.display());
        assert_eq!(release.to_string(), "2.10 to 2.11");
        assert_eq!(snapshot.warnings, [], "{}", path.display());
    }
}

#[test]
fn what_is_written_reads_the_same() {
    for path in recordings() {
        let (bytes, snapshot) = read(&path);
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        let again = Snapshot::read(&written, &ReadOptions::default()).unwrap();
        assert!(describe(&again) == describe(&snapshot), "{}", path.display());
        assert!(written.len() <= bytes.len(), "no sharing is lost: {}", path.display());
    }
}

/// Python's view of two pickles: whether they are equal, and every event of the first as a line.
const COMPARE: &str = r#"
import pickle, sys, zlib
original, written = (pickle.load(open(path, "rb")) for path in sys.argv[1:])
assert original == written, "the written pickle differs"
orders = lambda s: [list(d) for d in (s, *s["segments"][0]["blocks"], *s["device_traces"][0][:100], *s["external_annotations"][:1])]
assert orders(original) == orders(written), "the order of keys differs"
for trace in original["device_traces"]:
    crc = 0
    for e in trace:
        frames = "/".join(f'{f["name"]}@{f["filename"]}:{f["line"]}' for f in e.get("frames", []))
        addr = e["addr"] if "addr" in e else e["device_free"]
        line = f'{e["action"]} {addr} {e["size"]} {e["stream"]} {e["time_us"]} {e["compile_context"]} {e["user_metadata"]} {frames}\n'
        crc = zlib.crc32(line.encode(), crc)
    print(len(trace), crc)
"#;

#[test]
fn python_sees_the_same() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for path in recordings() {
        let (bytes, snapshot) = read(&path);
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let (original, written) = (directory.join(stem), directory.join(format!("{stem}.written")));
        std::fs::write(&original, bytes).unwrap();
        snapshot.write(&mut std::fs::File::create(&written).unwrap()).unwrap();
        let mut python = Command::new("python3");
        python.arg("-").arg(&original).arg(&written).stdin(Stdio::piped());
        let Some(mut child) = spawn(&mut python) else { return };
        child.stdin.take().unwrap().write_all(COMPARE.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{stem}: {}", String::from_utf8_lossy(&output.stderr));
        let mut ours = String::new();
        for trace in &snapshot.traces {
            let mut crc = flate2::Crc::new();
            for event in trace.iter() {
                let text = |id| snapshot.strings.get(id);
                let frames: Vec<_> =
                    snapshot.stacks.frames(event.stack).map(|id| snapshot.stacks.frame(id)).collect();
                let frames: Vec<_> = frames
                    .iter()
                    .map(|f| format!("{}@{}:{}", text(f.name), text(f.filename), f.line))
                    .collect();
                let line = format!(
                    "{} {} {} {} {} {} {} {}\n",
                    action_name(event.action),
                    event.addr,
                    event.size,
                    event.stream,
                    event.time_us.unwrap(),
                    text(event.compile_context),
                    text(event.user_metadata),
                    frames.join("/")
                );
                crc.update(line.as_bytes());
            }
            writeln!(ours, "{} {}", trace.len(), crc.sum()).unwrap();
        }
        assert_eq!(String::from_utf8_lossy(&output.stdout), ours, "{stem}");
        std::fs::remove_file(original).unwrap();
        std::fs::remove_file(written).unwrap();
    }
}

/// Starts Python, or nothing on a machine that has none.
fn spawn(command: &mut Command) -> Option<std::process::Child> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()
}
