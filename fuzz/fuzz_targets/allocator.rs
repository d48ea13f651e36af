//! Any life of an allocator keeps its invariants: the steps of the property test, chosen by coverage.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/unhand-alloc/tests/steps/mod.rs"]
mod steps;

use steps::Step;

fn bytes(input: &mut Unstructured<'_>) -> arbitrary::Result<u64> {
    let power = input.int_in_range(0..=27)?;
    Ok((1u64 << power) + input.int_in_range(0..=(1u64 << power) - 1)?)
}

fn step(input: &mut Unstructured<'_>) -> arbitrary::Result<Step> {
    Ok(match input.int_in_range(0..=29u8)? {
        0..=9 => Step::Malloc { bytes: bytes(input)?, stream: u8::arbitrary(input)? },
        10..=14 => Step::Free { nth: u16::arbitrary(input)? },
        15 => Step::FreeByAddress { nth: u16::arbitrary(input)? },
        16 | 17 => Step::RecordStream { nth: u16::arbitrary(input)?, stream: u8::arbitrary(input)? },
        18 => Step::Busy { stream: u8::arbitrary(input)? },
        19 => Step::Idle { stream: u8::arbitrary(input)? },
        20 => Step::EmptyCache,
        21 => Step::CreatePool {
            id: u8::arbitrary(input)?,
            use_on_oom: bool::arbitrary(input)?,
            no_split: bool::arbitrary(input)?,
        },
        22 => Step::Begin { id: u8::arbitrary(input)? },
        23 => Step::End { id: u8::arbitrary(input)? },
        24 => Step::Release { id: u8::arbitrary(input)? },
        25 => Step::Settings { which: u8::arbitrary(input)? },
        26 => Step::Limit { mib: u16::arbitrary(input)? % 512 },
        27 => Step::FreeNewest,
        28 => Step::Again { bytes: bytes(input)?, stream: u8::arbitrary(input)?, times: u8::arbitrary(input)? },
        _ => match input.int_in_range(0..=4u8)? {
            0 => Step::EmptyPool { id: u8::arbitrary(input)? },
            1 => Step::Snapshot,
            2 => Step::ResetPeak,
            3 => Step::MallocAt { nth: u16::arbitrary(input)?, bytes: bytes(input)?, offset: u16::arbitrary(input)? },
            _ => Step::Checkpoint { id: u8::arbitrary(input)? },
        },
    })
}

fuzz_target!(|data: &[u8]| {
    let mut input = Unstructured::new(data);
    let Ok((mib, minor, conf)) = <(u8, u8, u8)>::arbitrary(&mut input) else { return };
    let mut steps = Vec::new();
    while !input.is_empty() && steps.len() < 300 {
        let Ok(step) = step(&mut input) else { break };
        steps.push(step);
    }
    steps::run(64 << (mib % 7), 4 + minor % 12, conf, &steps);
});
