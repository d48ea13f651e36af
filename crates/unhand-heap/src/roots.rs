//! What lives although the root does not reach it, and what does not: reference counts against edges.

use crate::{Graph, Node, NodeSet, reachable};

/// The reference count of an object that is never freed, whoever refers to it.
pub const IMMORTAL: u32 = u32::MAX;

/// What [`external_roots`] says of the nodes that the root does not reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// Nodes that something outside the graph refers to, such as native code or a running expression. Ascending.
    pub native: Vec<Node>,
    /// Nodes that nothing keeps alive: they refer to one another, and wait for the collector.
    pub garbage: NodeSet,
}

/// Sorts the nodes that `root` does not reach into those that something outside the graph refers to, those that live
/// because of them, and garbage.
///
/// `reference_counts` has the count of each node, as the interpreter keeps it. A count above the number of edges into
/// the node, duplicates counted, says that somebody refers to it whom the graph does not show. Every such node is
/// native, also one that another native node reaches.
///
/// An [`IMMORTAL`] node has no count to compare: it is native only if nothing in the graph refers to it. It is never
/// garbage, nor is what it refers to. A node whose count is missing is taken for immortal: to call something garbage
/// needs a reason. O(n + m).
pub fn external_roots(graph: &Graph, root: Node, reference_counts: &[u32]) -> Roots {
    let from_root = reachable(graph, &[root], |_| true);
    let count = |node: Node| reference_counts.get(node as usize).copied().unwrap_or(IMMORTAL);
    let mut native = Vec::new();
    let mut alive = Vec::new();
    for (node, in_degree) in (0..).zip(graph.in_degrees()) {
        if from_root.contains(node) {
            continue;
        }
        let is_native = match count(node) {
            IMMORTAL => in_degree == 0,
            count => count > in_degree,
        };
        if is_native {
            native.push(node);
        }
        if is_native || count(node) == IMMORTAL {
            alive.push(node);
        }
    }
    let alive = reachable(graph, &alive, |node| !from_root.contains(node));
    let mut garbage = NodeSet::new(graph.n_nodes());
    garbage.extend((0..graph.n_nodes()).filter(|&node| !from_root.contains(node) && !alive.contains(node)));
    Roots { native, garbage }
}
