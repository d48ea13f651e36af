//! Random lives of an allocator: after every step all invariants hold. Failures shrink to the shortest life.

mod steps;

use proptest::prelude::*;
use steps::Step;

fn bytes() -> impl Strategy<Value = u64> {
    const MIB: u64 = 1 << 20;
    prop_oneof![
        1 => 0..2u64,
        4 => 1..4096u64,
        4 => 1..MIB,
        2 => prop::sample::select(vec![512, MIB - 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 20 * MIB + 1]),
        4 => MIB..20 * MIB,
        2 => 20 * MIB..90 * MIB,
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (bytes(), 0..3u8).prop_map(|(bytes, stream)| Step::Malloc { bytes, stream }),
        8 => any::<u16>().prop_map(|nth| Step::Free { nth }),
        2 => any::<u16>().prop_map(|nth| Step::FreeByAddress { nth }),
        1 => (any::<u16>(), bytes(), any::<u16>())
            .prop_map(|(nth, bytes, offset)| Step::MallocAt { nth, bytes, offset }),
        3 => (any::<u16>(), 0..3u8).prop_map(|(nth, stream)| Step::RecordStream { nth, stream }),
        1 => (0..3u8).prop_map(|stream| Step::Busy { stream }),
        1 => (0..3u8).prop_map(|stream| Step::Idle { stream }),
        1 => Just(Step::EmptyCache),
        1 => (0..3u8, any::<bool>(), any::<bool>())
            .prop_map(|(id, use_on_oom, no_split)| Step::CreatePool { id, use_on_oom, no_split }),
        1 => (0..3u8).prop_map(|id| Step::Begin { id }),
        1 => (0..3u8).prop_map(|id| Step::End { id }),
        1 => (0..3u8).prop_map(|id| Step::Release { id }),
        1 => (0..3u8).prop_map(|id| Step::EmptyPool { id }),
        1 => (0..8u8).prop_map(|which| Step::Settings { which }),
        1 => (0..400u16).prop_map(|mib| Step::Limit { mib }),
        1 => Just(Step::Snapshot),
        1 => Just(Step::ResetPeak),
        1 => (0..3u8).prop_map(|id| Step::Checkpoint { id }),
        4 => (bytes(), 0..3u8, any::<u8>()).prop_map(|(bytes, stream, times)| Step::Again { bytes, stream, times }),
        4 => Just(Step::FreeNewest),
    ]
}

proptest! {
    // `PROPTEST_CASES` runs more of them.
    #![proptest_config(if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() })]
    #[test]
    fn prop_every_invariant_holds_after_every_step(
        mib in prop::sample::select(vec![64u64, 256, 4096]),
        minor in 4..=15u8,
        conf in 0..8u8,
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 40 } else { 200 }),
    ) {
        steps::run(mib, minor, conf, &steps);
    }
}
