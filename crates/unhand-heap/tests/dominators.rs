//! Dominators against their definition: without the node, what becomes unreachable? On random graphs.

mod support;

use proptest::prelude::*;
use support::{graph_of, graphs, reach_without};
use unhand_heap::{Dominators, Graph, Node};

/// By node: everything on every way to it, by taking each node away; `None` when it is not reachable at all.
fn by_definition(graph: &Graph, root: Node) -> Vec<Option<Vec<Node>>> {
    let n_nodes = graph.n_nodes();
    let all = reach_without(graph, root, None);
    let without: Vec<Vec<bool>> = (0..n_nodes).map(|cut| reach_without(graph, root, Some(cut))).collect();
    let dominators_of = |node: Node| -> Vec<Node> {
        (0..n_nodes).filter(|&cut| all[cut as usize] && !without[cut as usize][node as usize]).collect()
    };
    (0..n_nodes).map(|node| all[node as usize].then(|| dominators_of(node))).collect()
}

/// The dominators of a node by going up the tree, ascending, itself included.
fn by_tree(dominators: &Dominators, node: Node) -> Option<Vec<Node>> {
    dominators.is_reachable(node).then(|| {
        let mut found: Vec<Node> =
            std::iter::successors(Some(node), |&node| dominators.immediate(node)).collect();
        found.sort_unstable();
        found
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn prop_dominators_are_what_the_definition_says(edges in graphs(14, 40), root in 0..14_u32) {
        let graph = graph_of(14, &edges);
        let dominators = Dominators::of(&graph, root);
        for (node, expected) in (0..).zip(by_definition(&graph, root)) {
            prop_assert_eq!(by_tree(&dominators, node), expected, "node {}", node);
        }
        prop_assert_eq!(dominators.immediate(root), None);
    }

    #[test]
    fn prop_retained_is_what_becomes_unreachable(
        edges in graphs(14, 40),
        root in 0..14_u32,
        weights in prop::collection::vec(0..1000_u64, 14),
    ) {
        let graph = graph_of(14, &edges);
        let all = reach_without(&graph, root, None);
        for (node, retained) in (0..).zip(Dominators::of(&graph, root).retained(&weights)) {
            let left = reach_without(&graph, root, Some(node));
            let lost = |other: usize| all[other] && !left[other];
            let expected: u64 = if all[node as usize] {
                (0..14).filter(|&other| lost(other)).map(|other| weights[other]).sum()
            } else {
                weights[node as usize]
            };
            prop_assert_eq!(retained, expected, "node {}", node);
        }
    }

    #[test]
    fn prop_the_common_dominator_is_the_nearest(
        edges in graphs(14, 40),
        root in 0..14_u32,
        nodes in prop::collection::vec(0..14_u32, 0..4),
    ) {
        let graph = graph_of(14, &edges);
        let expected = by_definition(&graph, root);
        let mut shared: Option<Vec<Node>> = None;
        let mut are_reachable = true;
        for &node in &nodes {
            match &expected[node as usize] {
                None => are_reachable = false,
                Some(own) => shared = Some(match shared {
                    None => own.clone(),
                    Some(shared) => shared.into_iter().filter(|node| own.contains(node)).collect(),
                }),
            }
        }
        // The nearest is the one with the most dominators of its own.
        let nearest = shared.filter(|_| are_reachable).and_then(|shared| {
            shared.into_iter().max_by_key(|&node| expected[node as usize].as_ref().map_or(0, Vec::len))
        });
        prop_assert_eq!(Dominators::of(&graph, root).common(&nodes), nearest);
    }

    /// Sparse, long graphs: chains with a few edges across, where path compression and long ways up happen.
    #[test]
    fn prop_dominators_of_long_chains_with_shortcuts(
        shortcuts in prop::collection::vec((0..60_u32, 0..60_u32), 0..12),
    ) {
        let chain = (0..59).map(|node| (node, node + 1));
        let edges: Vec<_> = chain.chain(shortcuts).collect();
        let graph = graph_of(60, &edges);
        let dominators = Dominators::of(&graph, 0);
        for (node, expected) in (0..).zip(by_definition(&graph, 0)) {
            prop_assert_eq!(by_tree(&dominators, node), expected, "node {}", node);
        }
    }

    /// Many nodes below a chain that the root refers to as well: the way up by jumps.
    #[test]
    fn prop_dominators_of_shared_leaves_below_a_chain(
        length in 20..60_u32,
        leaves in prop::collection::vec((0..60_u32, 0..60_u32), 200..300),
    ) {
        let mut edges: Vec<_> = (0..length).map(|node| (node, node + 1)).collect();
        for (leaf, &(above, also)) in (length + 1..).zip(&leaves) {
            edges.extend([(length.saturating_sub(above % 4), leaf), (also % (length + 1), leaf)]);
        }
        let n_nodes = length + 301;
        let graph = graph_of(n_nodes, &edges);
        let dominators = Dominators::of(&graph, 0);
        for (leaf, &(above, also)) in (length + 1..).zip(&leaves) {
            let expected = length.saturating_sub(above % 4).min(also % (length + 1));
            prop_assert_eq!(dominators.immediate(leaf), Some(expected));
        }
    }
}

#[test]
fn nothing_is_reachable_from_a_node_that_is_not_there() {
    let graph = graph_of(2, &[(0, 1)]);
    let dominators = Dominators::of(&graph, 7);
    assert!(!dominators.is_reachable(0) && !dominators.is_reachable(7));
    assert_eq!((dominators.immediate(1), dominators.common(&[1])), (None, None));
    assert_eq!(dominators.retained(&[3, 4]), [3, 4]);
    assert_eq!(Dominators::of(&graph_of(0, &[]), 0).retained(&[]), [0_u64; 0]);
}

#[test]
fn missing_weights_are_nothing_and_sums_do_not_overflow() {
    let dominators = Dominators::of(&graph_of(3, &[(0, 1), (0, 2)]), 0);
    assert_eq!(dominators.retained(&[1]), [1, 0, 0]);
    assert_eq!(dominators.retained(&[1, u64::MAX, 1]), [u64::MAX, u64::MAX, 1]);
}
