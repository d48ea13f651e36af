//! What a node reaches, and on which way. Breadth first, so that ways are shortest.

use std::collections::VecDeque;

use crate::{Graph, NONE, Node, NodeSet};

/// All nodes that `from` reaches, `from` itself included, following edges out of nodes for which `is_open` says so.
///
/// The nodes of `from` are always followed. A node that is not open is reached, and nothing is reached through it.
/// O(n + m) time; each edge is looked at once. 4 bytes for each node that is followed while it works.
pub fn reachable(graph: &Graph, from: &[Node], is_open: impl Fn(Node) -> bool) -> NodeSet {
    let mut reached = NodeSet::new(graph.n_nodes());
    let mut waiting: Vec<Node> = Vec::new();
    for &node in from {
        if node < graph.n_nodes() && reached.insert(node) {
            waiting.push(node);
        }
    }
    // First in, first out: what is looked up for one node does not depend on the node before, so that the processor
    // waits for the memory of several at once.
    let mut n_done = 0;
    while let Some(&node) = waiting.get(n_done) {
        n_done += 1;
        for &next in graph.successors(node) {
            if reached.insert(next) && is_open(next) {
                waiting.push(next);
            }
        }
    }
    reached
}

/// A shortest way along edges from one node to another, both included; `None` when there is none. O(n + m).
///
/// Of several shortest ways it is the one that goes through the successors that come first.
pub fn shortest_path(graph: &Graph, from: Node, to: Node) -> Option<Vec<Node>> {
    search(graph, from, Some(to)).to(to)
}

/// The shortest ways from one node to every other: asked once, answered often.
#[derive(Clone, Debug)]
pub struct Paths {
    from: Node,
    /// The node before, on the way; `NONE` where there is no way. The beginning is before itself.
    before: Vec<Node>,
}

impl Paths {
    /// Searches from one node, breadth first. O(n + m) time, 4 bytes a node.
    pub fn from(graph: &Graph, node: Node) -> Paths {
        search(graph, node, None)
    }

    /// A shortest way to a node, both ends included; `None` when there is none. O(length).
    pub fn to(&self, node: Node) -> Option<Vec<Node>> {
        let mut path = vec![node];
        let mut at = node;
        while at != self.from {
            at = *self.before.get(at as usize).filter(|&&before| before != NONE)?;
            path.push(at);
        }
        self.before.get(at as usize).filter(|&&before| before != NONE)?;
        path.reverse();
        Some(path)
    }
}

fn search(graph: &Graph, from: Node, until: Option<Node>) -> Paths {
    let mut before = vec![NONE; graph.n_nodes() as usize];
    let mut waiting = VecDeque::new();
    if let Some(place) = before.get_mut(from as usize) {
        *place = from;
        waiting.push_back(from);
    }
    while let Some(node) = waiting.pop_front() {
        if until == Some(node) {
            break;
        }
        for &next in graph.successors(node) {
            if before[next as usize] == NONE {
                before[next as usize] = node;
                waiting.push_back(next);
            }
        }
    }
    Paths { from, before }
}
