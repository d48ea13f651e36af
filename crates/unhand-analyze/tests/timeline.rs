//! The single pass agrees with a model that keeps every block in a list.

use proptest::prelude::*;
use unhand_analyze::{Rounding, Timeline};
use unhand_snapshot::{Action, Block, BlockState, Event, Segment, Snapshot, StackId, StringId};

/// What happens at one of a few addresses. What makes no sense there (a free of nothing) is left out.
#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc(u8, u32),
    FreeRequested(u8),
    FreeCompleted(u8),
    Free(u8),
    SegmentAlloc(u8),
    SegmentFree(u8),
}

const SLOTS: u8 = 8;
const SLOT_BYTES: u64 = 64 << 20;
const BASE: u64 = 1 << 40;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..SLOTS, 1..50_000_000_u32).prop_map(|(slot, bytes)| Step::Alloc(slot, bytes)),
        3 => (0..SLOTS).prop_map(Step::FreeRequested),
        3 => (0..SLOTS).prop_map(Step::FreeCompleted),
        1 => (0..SLOTS).prop_map(Step::Free),
        1 => (0..SLOTS).prop_map(Step::SegmentAlloc),
        1 => (0..SLOTS).prop_map(Step::SegmentFree),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Allocated(u64),
    Pending(u64),
}

#[derive(Clone, Debug, Default)]
struct Model {
    blocks: [Option<State>; SLOTS as usize],
    segments: [u64; SLOTS as usize],
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    requested: u64,
    allocated: u64,
    pending: u64,
    reserved: u64,
}

impl Model {
    fn totals(&self, rounding: &Rounding) -> Totals {
        let mut totals = Totals { reserved: self.segments.iter().sum(), ..Totals::default() };
        for state in self.blocks.iter().flatten() {
            match *state {
                State::Allocated(bytes) => {
                    totals.requested += bytes;
                    totals.allocated += rounding.block_bytes(bytes);
                }
                State::Pending(bytes) => {
                    totals.requested += bytes;
                    totals.pending += bytes;
                }
            }
        }
        totals
    }

    /// Applies a step, and says which event it is recorded as.
    fn apply(&mut self, step: Step) -> Option<(Action, u8, u64)> {
        match step {
            Step::Alloc(slot, bytes) => {
                let block = &mut self.blocks[slot as usize];
                if block.is_some() {
                    return None;
                }
                *block = Some(State::Allocated(u64::from(bytes)));
                Some((Action::Alloc, slot, u64::from(bytes)))
            }
            Step::FreeRequested(slot) => match self.blocks[slot as usize] {
                Some(State::Allocated(bytes)) => {
                    self.blocks[slot as usize] = Some(State::Pending(bytes));
                    Some((Action::FreeRequested, slot, bytes))
                }
                _ => None,
            },
            Step::FreeCompleted(slot) => match self.blocks[slot as usize] {
                Some(State::Pending(bytes)) => {
                    self.blocks[slot as usize] = None;
                    Some((Action::FreeCompleted, slot, bytes))
                }
                _ => None,
            },
            Step::Free(slot) => match self.blocks[slot as usize] {
                Some(State::Allocated(bytes)) => {
                    self.blocks[slot as usize] = None;
                    Some((Action::Free, slot, bytes))
                }
                _ => None,
            },
            Step::SegmentAlloc(slot) => {
                let segment = &mut self.segments[slot as usize];
                (*segment == 0).then(|| {
                    *segment = SLOT_BYTES;
                    (Action::SegmentAlloc, slot, SLOT_BYTES)
                })
            }
            Step::SegmentFree(slot) => {
                let segment = &mut self.segments[slot as usize];
                (*segment > 0).then(|| {
                    *segment = 0;
                    (Action::SegmentFree, slot, SLOT_BYTES)
                })
            }
        }
    }

    /// The segments of a snapshot taken now. Blocks of slots without a segment go into one of their own, which
    /// does not count as reserved.
    fn segments(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        for slot in 0..SLOTS {
            let address = BASE + u64::from(slot) * SLOT_BYTES;
            let total = self.segments[slot as usize];
            let block = self.blocks[slot as usize].map(|state| {
                let (state, bytes) = match state {
                    State::Allocated(bytes) => (BlockState::ActiveAllocated, bytes),
                    State::Pending(bytes) => (BlockState::ActivePendingFree, bytes),
                };
                Block { address, size: bytes, requested_size: bytes, state, ..Block::default() }
            });
            if total > 0 || block.is_some() {
                segments.push(Segment {
                    address,
                    total_size: total,
                    blocks: block.into_iter().collect(),
                    ..Segment::default()
                });
            }
        }
        segments
    }
}

fn event(action: Action, slot: u8, bytes: u64, index: usize) -> Event {
    Event {
        action,
        addr: BASE + u64::from(slot) * SLOT_BYTES,
        size: bytes,
        stream: 0,
        time_us: Some(1_000 + i64::try_from(index).expect("a short history")),
        stack: StackId::NONE,
        compile_context: StringId(0),
        user_metadata: StringId(0),
        pool_id: None,
        action_name: StringId(0),
    }
}

proptest! {
    /// The first `unseen` steps happen before the history begins.
    #[test]
    fn prop_agrees_with_a_list_of_blocks(
        steps in proptest::collection::vec(step(), 1..200),
        unseen in 0_usize..40,
    ) {
        let mut snapshot = Snapshot::default();
        snapshot.traces.push(unhand_snapshot::Trace::default());
        let rounding = Rounding::of(&snapshot.settings);
        let mut model = Model::default();
        let unseen = unseen.min(steps.len());
        for &step in &steps[..unseen] {
            model.apply(step);
        }
        let start = model.totals(&rounding);
        let mut top = start;
        let mut requested_top_event = None;
        for &step in &steps[unseen..] {
            if let Some((action, slot, bytes)) = model.apply(step) {
                let index = snapshot.traces[0].len();
                snapshot.traces[0].push(event(action, slot, bytes, index));
                let now = model.totals(&rounding);
                if now.requested > top.requested {
                    requested_top_event = Some(index);
                }
                top.requested = top.requested.max(now.requested);
                top.allocated = top.allocated.max(now.allocated);
                top.pending = top.pending.max(now.pending);
                top.reserved = top.reserved.max(now.reserved);
            }
        }
        prop_assume!(!snapshot.traces[0].is_empty());
        snapshot.segments = model.segments();
        let end = model.totals(&rounding);

        let timeline = Timeline::of(&snapshot, 0).expect("it has a history");
        let curve = |c: unhand_analyze::Curve| (c.start_bytes, c.peak_bytes, c.end_bytes);
        prop_assert_eq!(curve(timeline.requested), (start.requested, top.requested, end.requested));
        prop_assert_eq!(curve(timeline.allocated), (start.allocated, top.allocated, end.allocated));
        prop_assert_eq!(curve(timeline.pending), (start.pending, top.pending, end.pending));
        prop_assert_eq!(curve(timeline.reserved), (start.reserved, top.reserved, end.reserved));
        prop_assert_eq!(timeline.requested.peak_event, requested_top_event);
        let alive: u64 = timeline.lives.iter().filter(|l| l.survives()).map(|l| l.requested_bytes).sum();
        prop_assert_eq!(alive, end.requested);
        if let Some(event) = requested_top_event {
            let active: u64 = timeline.active_after(event).map(|l| l.requested_bytes).sum();
            prop_assert_eq!(active, top.requested);
        }
    }

    #[test]
    fn prop_never_panics_on_senseless_histories(
        raw in proptest::collection::vec((0_u8..12, 0_u8..SLOTS, any::<u64>()), 1..100),
        shift in 0_u32..50,
    ) {
        const ACTIONS: [Action; 12] = [
            Action::Alloc, Action::FreeRequested, Action::FreeCompleted, Action::Free, Action::SegmentAlloc,
            Action::SegmentFree, Action::SegmentMap, Action::SegmentUnmap, Action::Snapshot, Action::Oom,
            Action::Annotate, Action::Other,
        ];
        let mut snapshot = Snapshot::default();
        snapshot.traces.push(unhand_snapshot::Trace::default());
        for (index, &(action, slot, bytes)) in raw.iter().enumerate() {
            snapshot.traces[0].push(event(ACTIONS[action as usize], slot, bytes >> shift, index));
        }
        let blocks = raw.iter().map(|&(state, slot, bytes)| Block {
            address: BASE + u64::from(slot) * SLOT_BYTES,
            size: bytes >> shift,
            requested_size: bytes >> shift,
            state: if state < 6 { BlockState::Inactive } else { BlockState::ActiveAllocated },
            ..Block::default()
        });
        let is_expandable = shift > 20;
        snapshot.segments.push(Segment { address: BASE, total_size: 1 << 30, is_expandable, blocks: blocks.collect(), ..Segment::default() });
        let options = unhand_analyze::ExplainOptions::default();
        let Ok(explanation) = unhand_analyze::explain(&snapshot, 0, &options) else {
            let sum: u128 = raw.iter().map(|&(.., bytes)| u128::from(bytes >> shift)).sum();
            prop_assert!(sum * 3 >= (1 << 62), "only absurd sums are refused");
            return Ok(());
        };
        prop_assert!(!unhand_analyze::render(&explanation, &unhand_analyze::TextOptions::default()).is_empty());
        prop_assert!(serde_json::to_string(&explanation).is_ok());
    }
}
