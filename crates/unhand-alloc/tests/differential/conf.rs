//! Random configuration strings, right and wrong: both parsers must accept the same ones and be left in the same
//! state, also after an error half-way.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::script::Script;

const MIB: u64 = 1 << 20;

/// Keys with values of their kind; the last ones exist in no release, or not in all.
const PAIRS: [(&str, &[&str]); 22] = [
    ("max_split_size_mb", &["20", "21", "64", "19", "1000000"]),
    ("max_split_size_mb", NUMBERS),
    ("max_non_split_rounding_mb", &["20", "32", "64", "19"]),
    ("max_non_split_rounding_mb", &["24", "0", "2.5", "30x", "x", "", "True", "+33"]),
    ("large_segment_size_mb", &["20", "12", "48", "11", "10"]),
    ("large_segment_size_mb", &["24", "0", "2.5", "30x", "x", "", " 40", "True", "+33"]),
    (
        "garbage_collection_threshold",
        &["0.5", "0.99", ".25", "1e-3", "0", "1", "1.0", "0.0", "-0.5", "nan", "x", ""],
    ),
    ("per_process_memory_fraction", &["0.5", "1", "0", "1.1", "-0.1", "1.0", "x"]),
    ("expandable_segments", BOOLS),
    ("expandable_segments", BOOLS),
    ("release_lock_on_cudamalloc", BOOLS),
    ("graph_capture_record_stream_reuse", BOOLS),
    ("throw_on_cudamalloc_oom", BOOLS),
    ("roundup_power2_divisions", &["1", "2", "8", "16", "0", "3", "64", "x", ""]),
    ("roundup_power2_divisions", LISTS),
    ("roundup_power2_divisions", LISTS),
    ("pinned_use_cuda_host_register", &["True", "False"]),
    ("pinned_num_register_threads", &["1", "8", "128"]),
    ("pinned_use_background_threads", &["True", "False"]),
    ("backend", &["native", "cudaMallocAsync", "other"]),
    ("pinned_reserve_segment_size_mb", &["1", "64"]),
    ("nonsense", &["1", "True", ""]),
];

const NUMBERS: &[&str] =
    &["24", "0", "1", "-1", "2.5", "30x", "x", "", " 40", "99999999999999999999", "True", "0x20", "+33"];
const BOOLS: &[&str] = &["True", "False", "True", "False", "true", "1", "", "TrueX"];
const LISTS: &[&str] = &[
    "[256:1,512:2,1024:4,>:8]",
    "[1:2]",
    "[64:8,>:2]",
    "[>:4]",
    "[32768:4]",
    "[65536:4,>:2]",
    "[3:2]",
    "[4:3]",
    "[4:0]",
    "[4:2",
    "[4:2,]",
    "[]",
    "[4,2]",
    "[512:2,256:4]",
    "[256 : 1 , 512 : 2]",
    "[2:1,>:2,64:4]",
    "256:1",
];

fn pair() -> impl Strategy<Value = String> {
    let separator =
        prop_oneof![20 => Just(":"), 1 => Just(" : "), 1 => Just(""), 1 => Just("="), 1 => Just("::")];
    select(&PAIRS[..])
        .prop_flat_map(|(key, values)| (Just(key), select(values)))
        .prop_flat_map(move |(key, value)| (Just(key), separator.clone(), Just(value)))
        .prop_map(|(key, separator, value)| format!("{key}{separator}{value}"))
}

fn conf() -> impl Strategy<Value = String> {
    let comma = prop_oneof![12 => Just(","), 1 => Just(", "), 1 => Just(",,"), 1 => Just(" "), 1 => Just(";"), 1 => Just(":")];
    (vec(pair(), 1..4), comma, prop::bool::weighted(0.05)).prop_map(|(pairs, comma, trailing)| {
        let text = pairs.join(comma);
        if trailing { text + "," } else { text }
    })
}

/// A script that applies several strings and shows what came of each: by the settings in a snapshot, and by the
/// segments and blocks of a few requests where a setting is in no snapshot.
pub(crate) fn script() -> impl Strategy<Value = Script> {
    vec(conf(), 1..6).prop_map(|confs| {
        let mut script = Script { total: 1024 * MIB, ..Script::default() };
        for (number, conf) in confs.iter().enumerate() {
            script.lines.push(format!("settings {conf}"));
            script.lines.push("snapshot".to_owned());
            let blocks = [3 * MIB, 50 * MIB, 25 * MIB, 1200];
            let id = |at: usize| number * blocks.len() + at + 1;
            script
                .lines
                .extend(blocks.iter().enumerate().map(|(at, bytes)| format!("malloc {} {bytes} 0", id(at))));
            script.lines.push(format!("free {}", id(1)));
            // Whether a block much larger than the request will do is max_non_split_rounding's to say.
            script.lines.push(format!("malloc {} {} 0", id(1), 24 * MIB));
            script.lines.extend((0..blocks.len()).map(|at| format!("free {}", id(at))));
            script.lines.push("empty_cache".to_owned());
        }
        script
    })
}
