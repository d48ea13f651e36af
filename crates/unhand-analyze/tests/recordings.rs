//! The answers agree with what torch itself reported at the end of each recording.

mod support;

use support::{RECORDINGS, recording, reported};
use unhand_analyze::{Category, ExplainOptions, Flame, FlameOf, Ranks, Timeline, Verdict, devices, explain};

#[test]
fn peaks_and_ends_are_those_torch_reported() {
    for name in RECORDINGS {
        let snapshot = recording(name);
        let timeline = Timeline::of(&snapshot, 0).expect("it has a history");
        let told = |statistic: &str| reported(name, statistic);
        assert_eq!(timeline.requested.peak_bytes, told("requested_bytes.all.peak"), "{name}: requested peak");
        assert_eq!(timeline.reserved.peak_bytes, told("reserved_bytes.all.peak"), "{name}: reserved peak");
        assert_eq!(
            timeline.requested.end_bytes,
            told("requested_bytes.all.current"),
            "{name}: requested end"
        );
        assert_eq!(timeline.reserved.end_bytes, told("reserved_bytes.all.current"), "{name}: reserved end");
        assert_eq!(timeline.gaps, unhand_analyze::Gaps::default(), "{name}: nothing is missing");
        let (lower, truth) = (timeline.allocated.peak_bytes, told("allocated_bytes.all.peak"));
        assert!(lower <= truth && lower * 100 >= truth * 99, "{name}: {lower} is close below {truth}");
    }
}

#[test]
fn the_end_is_the_state_torch_reported() {
    for name in RECORDINGS {
        let snapshot = recording(name);
        assert_eq!(devices(&snapshot), [0]);
        let end = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there").end;
        let told = |statistic: &str| reported(name, statistic);
        assert_eq!(end.requested_bytes, told("requested_bytes.all.current"), "{name}");
        assert_eq!(end.allocated_bytes, told("allocated_bytes.all.current"), "{name}");
        assert_eq!(end.allocated_bytes + end.pending_bytes, told("active_bytes.all.current"), "{name}");
        assert_eq!(end.reserved_bytes, told("reserved_bytes.all.current"), "{name}");
        let cached = end.reserved_bytes - end.allocated_bytes - end.pending_bytes;
        assert_eq!(end.cache.cached_bytes, cached, "{name}");
        assert_eq!(end.streams.iter().map(|s| s.cached_bytes).sum::<u64>(), cached, "{name}");
        assert_eq!(end.pools.iter().map(|p| p.reserved_bytes).sum::<u64>(), end.reserved_bytes, "{name}");
    }
}

#[test]
fn holders_add_up_to_the_peak() {
    for name in RECORDINGS {
        let snapshot = recording(name);
        let explanation = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
        let (held, peak) = (explanation.at_peak.expect("a history"), explanation.peak.expect("a history"));
        assert_eq!(held.requested_bytes, peak.requested.peak_bytes, "{name}");
        assert_eq!(
            held.holders.iter().map(|h| h.requested_bytes).sum::<u64>(),
            held.requested_bytes,
            "{name}"
        );
        let flame = Flame::of(&snapshot, 0, FlameOf::RequestedPeak).expect("a history");
        assert_eq!(flame.total_bytes, held.requested_bytes, "{name}");
        let end = Flame::of(&snapshot, 0, FlameOf::End).expect("segments");
        assert_eq!(end.total_bytes, explanation.end.requested_bytes, "{name}");
    }
}

#[test]
fn the_leak_is_named_and_nothing_else_is() {
    for name in RECORDINGS {
        let snapshot = recording(name);
        let explanation = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
        let leaks = explanation.leaks.expect("a history");
        if !name.starts_with("leak.") {
            assert!(leaks.suspects.is_empty(), "{name}: {:?}", leaks.suspects);
            continue;
        }
        let [suspect] = leaks.suspects.as_slice() else { panic!("{name}: {:?}", leaks.suspects) };
        assert_eq!((suspect.repetitions, suspect.blocks_per_repetition), (40, 49), "{name}");
        assert_eq!(suspect.growth_bytes, 150_994_948, "{name}");
        if name == "leak.stacks" {
            assert_eq!(suspect.site, "record.py:40 (leak)");
            assert_eq!(suspect.category, Some(Category::Activations));
            assert!(
                suspect
                    .sentence
                    .starts_with("each repetition of record.py:40 leaves 49 blocks, 144.0 MiB; 40")
            );
        } else {
            assert!(suspect.sentence.contains("the line is not known"), "{}", suspect.sentence);
        }
    }
}

#[test]
fn without_annotated_steps_the_leak_is_still_named() {
    for name in ["leak.stacks", "gpt2.stacks"] {
        let mut snapshot = recording(name);
        snapshot.annotations.clear();
        let explanation = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
        let sites: Vec<String> =
            explanation.leaks.expect("a history").suspects.iter().map(|s| s.site.clone()).collect();
        let expected: &[&str] = if name == "leak.stacks" { &["record.py:40 (leak)"] } else { &[] };
        assert_eq!(sites, expected, "{name}");
    }
}

#[test]
fn the_out_of_memory_error_is_a_limit() {
    let snapshot = recording("gpt2.gc");
    let explanation = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
    let [oom] = explanation.ooms.as_slice() else { panic!("one error") };
    assert_eq!(oom.verdict, Verdict::Limit);
    assert_eq!(oom.wanted_bytes, 1_608_224_256);
    assert_eq!(oom.device_free_bytes, 96_597_704_704);
    // What torch had live then is what it had live at the end and what was freed since.
    assert!(oom.requested_bytes > explanation.end.requested_bytes);
    assert_eq!(oom.reserved_bytes, explanation.end.reserved_bytes);
}

#[test]
fn segments_alone_are_explained() {
    let mut snapshot = recording("leak.stacks");
    let whole = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
    snapshot.traces.clear();
    let alone = explain(&snapshot, 0, &ExplainOptions::default()).expect("device 0 is there");
    assert!(alone.peak.is_none() && alone.leaks.is_none());
    assert_eq!(alone.end.allocated_bytes, whole.end.allocated_bytes);
    assert_eq!(alone.end.holding.holders[0].site.name, "record.py:40 (leak)");
    assert!(alone.notes[0].starts_with("No history was recorded"), "{:?}", alone.notes);
}

#[test]
fn the_rank_that_needs_more_is_named() {
    let explain_as = |name: &str, rank: usize| {
        let options =
            ExplainOptions { file: Some(format!("rank{rank}.pickle")), ..ExplainOptions::default() };
        explain(&recording(name), 0, &options).expect("device 0 is there")
    };
    let mut all: Vec<_> = (0..3).map(|rank| explain_as("gpt2.default", rank)).collect();
    assert!(Ranks::of(&all).odd.is_empty());
    all.push(explain_as("gpt2.split64", 3));
    let ranks = Ranks::of(&all);
    let sentences: Vec<&str> = ranks.odd.iter().map(|o| o.sentence.as_str()).collect();
    assert_eq!(
        sentences,
        ["rank3.pickle reserved at most 28.3 GiB: 11.7 GiB more than the median of 16.5 GiB (71% of it)."]
    );
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let snapshot = recording("streams.default");
    let error = explain(&snapshot, 3, &ExplainOptions::default()).expect_err("no device 3");
    assert_eq!(error.to_string(), "the snapshot has no device: `3` (it has 0)");
}
