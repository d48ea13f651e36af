//! The rank that was different: by its totals, by the lines that hold more, by the shapes of its data.

mod support;

use insta::assert_snapshot;
use support::recording;
use unhand_analyze::{ExplainOptions, Explanation, InputShape, RankFacts, Ranks, TextOptions, explain};

/// As many ranks that did the same.
fn alike(n_ranks: usize) -> Vec<Explanation> {
    let snapshot = recording("gpt2.stacks");
    let rank = |number: usize| {
        let options = ExplainOptions {
            file: Some(format!("rank{number}/snapshot.pickle")),
            ..ExplainOptions::default()
        };
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
    assert_snapshot!(comparison.render(&options), @"
                            peak need   peak res.  end alloc.    end res.
    rank0/snapshot.pickle    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    rank1/snapshot.pickle    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    rank2/snapshot.pickle    14.4 GiB    19.5 GiB     4.5 GiB    16.5 GiB
    rank3/snapshot.pickle    14.4 GiB    16.5 GiB     1.5 GiB    16.5 GiB
    rank2/snapshot.pickle reserved at most 19.5 GiB: 3.0 GiB more than the median of 16.5 GiB (18% of it).
    rank2/snapshot.pickle still holds 4.5 GiB: 3.0 GiB more than the median of 1.5 GiB (206% of it).

    Rank 2 is different: it has 4.5 GiB allocated where the others have 1.5 GiB. The difference is at
    transformers/activations.py:66, activations: 7.4 GiB instead of 4.4 GiB. Its `tokens` is of shape
    [16, 512] where the others have [8, 512].
    ");
}

#[test]
fn the_shape_of_the_data_alone_tells_too() {
    let comparison = Ranks::with_facts(&alike(3), &facts(&[[8, 512], [8, 512], [8, 768]]));
    let different = comparison.different.expect("one has other data");
    assert_eq!((different.row, different.holders.len()), (2, 0));
    assert_snapshot!(different.sentence, @"Rank 2 is different, though it holds as much as the others. Its `tokens` is of shape [8, 768] where the others have [8, 512].");
    // With two there is no telling which.
    assert!(Ranks::with_facts(&alike(3), &facts(&[[8, 512], [8, 640], [8, 768]])).different.is_none());
}

#[test]
fn two_are_compared_and_neither_is_blamed() {
    let mut ranks = alike(2);
    grow(&mut ranks[0], 3 << 30);
    let different = Ranks::of(&ranks).different.expect("they differ");
    assert_snapshot!(different.sentence, @"rank0/snapshot.pickle is different: it has 4.5 GiB allocated where rank1/snapshot.pickle has 1.5 GiB. The difference is at transformers/activations.py:66, activations: 7.4 GiB instead of 4.4 GiB. Two do not say which of them is wrong.");
}
