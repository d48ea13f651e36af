//! The rank that was different: by its totals, by the lines that hold more, by the shapes of its data.

mod support;

use insta::assert_snapshot;
use support::recording;
use unhand_analyze::{ExplainOptions, Explanation, InputShape, RankFacts, Ranks, TextOptions, explain};

/// As many ranks that did the same.
fn alike(n_ranks: usize) -> Vec<Explanation> {
    let snapshot = recording("gpt2.stacks");
    let rank = |number: usize| {
        let options = ExplainOptions { file: Some(format!("rank{number}/snapshot.pickle")), ..ExplainOptions::default() };
        explain(&snapshot, 0, &options).expect("device 0 is there")
    };
    (0..n_ranks).map(rank).collect()
}

fn facts(shapes: &[[u64; 2]]) -> Vec<RankFacts> {
    let of = |(rank, shape): (usize, &[u64; 2])| RankFacts {
        rank: Some(rank as u64),
        inputs: vec![InputShape { name: "tokens".to_owned(), shape: shape.to_vec() }],
    };
    shapes.iter().enumerate().map(of).collect()
}

/// Makes the largest holder at the peak and at the end larger.
fn grow(explanation: &mut Explanation, by_bytes: u64) {
    let peak = explanation.at_peak.as_mut().expect("a history");
    peak.holders[0].requested_bytes += by_bytes;
    explanation.end.allocated_bytes += by_bytes;
    explanation.peak.as_mut().expect("a history").reserved.peak_bytes += by_bytes;
}

#[test]
fn ranks_that_are_alike_have_no_odd_one() {
    assert_eq!(Ranks::of(&alike(4)).different, None);
    assert_eq!(Ranks::with_facts(&alike(3), &facts(&[[8, 512]; 3])).different, None);
    assert_eq!(Ranks::of(&[]).different, None);
}

#[test]
fn says_which_rank_and_where() {
    let mut ranks = alike(4);
    grow(&mut ranks[2], 3 << 30);
    let comparison = Ranks::with_facts(&ranks, &facts(&[[8, 512], [8, 512], [16, 512], [8, 512]]));
    assert_eq!(comparison.different.as_ref().map(|different| different.row), Some(2));
    let options = TextOptions { width: 100, ..TextOptions::default() };
    assert_snapshot!(comparison.render(&options), @"");
}

#[test]
fn the_shape_of_the_data_alone_tells_too() {
    let comparison = Ranks::with_facts(&alike(3), &facts(&[[8, 512], [8, 512], [8, 768]]));
    let different = comparison.different.expect("one has other data");
    assert_eq!((different.row, different.holders.len()), (2, 0));
    assert_snapshot!(different.sentence, @"");
    // With two there is no telling which.
    assert!(Ranks::with_facts(&alike(3), &facts(&[[8, 512], [8, 640], [8, 768]])).different.is_none());
}

#[test]
fn two_are_compared_and_neither_is_blamed() {
    let mut ranks = alike(2);
    grow(&mut ranks[0], 3 << 30);
    let different = Ranks::of(&ranks).different.expect("they differ");
    assert_snapshot!(different.sentence, @"");
}
