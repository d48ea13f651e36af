//! Random graphs, and the plainest way to ask what a node reaches.
#![allow(dead_code)] // Each test file uses its part.

use proptest::prelude::*;
use unhand_heap::{Graph, Node};

/// Edges among `n_nodes` nodes: self loops, duplicates and parts that nothing reaches included.
pub(crate) fn graphs(n_nodes: u32, max_edges: usize) -> impl Strategy<Value = Vec<(Node, Node)>> {
    prop::collection::vec((0..n_nodes, 0..n_nodes), 0..max_edges)
}

pub(crate) fn graph_of(n_nodes: u32, edges: &[(Node, Node)]) -> Graph {
    Graph::from_edges(n_nodes, edges).expect("the test makes graphs that there are")
}

/// By node: whether `root` reaches it when node `cut` is not there.
pub(crate) fn reach_without(graph: &Graph, root: Node, cut: Option<Node>) -> Vec<bool> {
    let start: &[Node] = if Some(root) == cut { &[] } else { &[root] };
    let edges: Vec<(Node, Node)> = graph.edges().collect();
    reach_by(graph.n_nodes(), start, &edges, |_, to| Some(to) != cut)
}

/// By node: whether one of `start` reaches it over the edges for which `is_edge` says so. By a fixed point over the
/// list of edges, not by a search.
pub(crate) fn reach_by(
    n_nodes: u32,
    start: &[Node],
    edges: &[(Node, Node)],
    is_edge: impl Fn(Node, Node) -> bool,
) -> Vec<bool> {
    let mut reached = vec![false; n_nodes as usize];
    for &node in start {
        reached[node as usize] = true;
    }
    loop {
        let mut has_changed = false;
        for &(from, to) in edges {
            if reached[from as usize] && !reached[to as usize] && is_edge(from, to) {
                reached[to as usize] = true;
                has_changed = true;
            }
        }
        if !has_changed {
            return reached;
        }
    }
}
