//! Sizes at which recursion or a square of anything would show: lists of two million cells.

mod support;

use support::graph_of;
use unhand_heap::{
    Dominators, Graph, Node, NodeSet, Owner, Paths, Question, external_roots, holdings, reachable,
};

const LENGTH: u32 = 2_000_000;

/// `0 → 1 → 2 → …`
fn list(is_double: bool) -> Graph {
    let forth = (1..LENGTH).map(|node| (node - 1, node));
    let back = (2..LENGTH).filter(|_| is_double).map(|node| (node, node - 1));
    graph_of(LENGTH, &forth.chain(back).collect::<Vec<_>>())
}

#[test]
fn follows_a_list_of_two_million_cells() {
    for is_double in [false, true] {
        let graph = list(is_double);
        let dominators = Dominators::of(&graph, 0);
        assert!((1..LENGTH).all(|node| dominators.immediate(node) == Some(node - 1)));
        let retained = dominators.retained(&vec![1; LENGTH as usize]);
        assert!((0..).zip(retained).all(|(node, bytes)| bytes == u64::from(LENGTH - node)));
        assert_eq!(dominators.common(&[LENGTH - 1, LENGTH - 2, 7]), Some(7));
        assert_eq!(Paths::from(&graph, 0).to(LENGTH - 1), Some((0..LENGTH).collect()));
        assert_eq!(reachable(&graph, &[0], |_| true).len(), LENGTH as usize);
        assert_eq!(external_roots(&graph, LENGTH - 1, &graph.in_degrees()).native, [] as [Node; 0]);
    }
}

#[test]
fn holds_targets_all_along_a_list() {
    // Every second node is a target, so that each cell that is not one holds something of its own.
    for is_double in [false, true] {
        let graph = list(is_double);
        let targets: Vec<(Node, u64)> = (3..LENGTH).step_by(2).map(|node| (node, 10)).collect();
        let bytes = 10 * targets.len() as u64;
        let answer = holdings(&Question { graph: &graph, root: 0, anchors: &[1], targets: &targets });
        assert_eq!(answer.retained_by_owner, [(Owner { anchor: 1, child: 2 }, bytes)]);
        let [holding] = &answer.holdings[..] else { panic!("one owner holds all") };
        let levels: Vec<_> = holding.parts.iter().map(|part| (part.node, part.parent, part.bytes)).collect();
        let expected =
            [(2, None, bytes), (4, Some(0), bytes - 10), (6, Some(1), bytes - 20), (8, Some(2), bytes - 30)];
        assert_eq!(levels, expected);
    }
}

/// A list whose end refers to many nodes that the root refers to as well. Each has to go up the whole list, step by
/// step or not.
#[test]
fn shared_nodes_below_a_long_list_take_no_square() {
    let length = 300_000;
    let mut edges: Vec<(Node, Node)> = (0..length).map(|node| (node, node + 1)).collect();
    for leaf in length + 1..2 * length {
        edges.extend([(length, leaf), (1 + leaf % 2, leaf)]);
    }
    let dominators = Dominators::of(&graph_of(2 * length, &edges), 0);
    assert!((length + 1..2 * length).all(|leaf| dominators.immediate(leaf) == Some(1 + leaf % 2)));
    assert!((1..=length).all(|node| dominators.immediate(node) == Some(node - 1)));
}

/// Cells that refer to each other in both directions, and each with an owner of its own.
#[test]
fn a_circle_with_a_hundred_thousand_owners_is_one_holding() {
    let n_owners = 100_000;
    // Root 0, namespace 1, then the cells, then a target.
    let cells = 2..2 + n_owners;
    let target = cells.end;
    let mut edges: Vec<(Node, Node)> = vec![(0, 1), (cells.end - 1, target)];
    for cell in cells.clone() {
        edges.extend([(1, cell), (cell, if cell + 1 == cells.end { cells.start } else { cell + 1 })]);
    }
    let graph = graph_of(target + 1, &edges);
    let answer = holdings(&Question { graph: &graph, root: 0, anchors: &[1], targets: &[(target, 5)] });
    let [holding] = &answer.holdings[..] else { panic!("one set of owners") };
    assert!(holding.more_owners);
    assert_eq!(holding.owners, (2..66).map(|child| Owner { anchor: 1, child }).collect::<Vec<_>>());
    assert_eq!(answer.retained_by_owner.len(), n_owners as usize);
    assert!(answer.retained_by_owner.iter().all(|&(_, bytes)| bytes == 0));
    assert_eq!(
        holding.parts.iter().map(|part| part.node).collect::<NodeSet>(),
        NodeSet::from_iter([target - 1])
    );
}
