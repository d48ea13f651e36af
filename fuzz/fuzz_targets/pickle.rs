//! Any bytes are read without a panic, and what could be read is written and read again as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use unhand_snapshot::{ReadOptions, Snapshot, decompress_limited};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(content) = decompress_limited(bytes, 1 << 20) {
        let _ = Snapshot::read(&content, &ReadOptions { tolerate_truncation: true });
    }
    let Ok(snapshot) = Snapshot::read(bytes, &ReadOptions::default()) else { return };
    let mut first = Vec::new();
    snapshot.write(&mut first).expect("what was read can be written");
    let again = Snapshot::read(&first, &ReadOptions::default()).expect("what was written can be read");
    let mut second = Vec::new();
    again.write(&mut second).expect("and written again");
    // The first writing merges frames that differ only in a key set twice; from then on nothing changes.
    let last = Snapshot::read(&second, &ReadOptions::default()).expect("what was written can be read");
    let mut third = Vec::new();
    last.write(&mut third).expect("and written again");
    let n_events = |snapshot: &Snapshot| snapshot.traces.iter().map(|trace| trace.len()).collect::<Vec<_>>();
    assert_eq!(n_events(&snapshot), n_events(&again));
    assert_eq!(snapshot.segments.len(), again.segments.len());
    assert!(second == third, "writing is stable");
});
