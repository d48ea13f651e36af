//! The one error type of this crate: a description of a graph that describes none.

use crate::Node;

/// Why numbers do not make a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The offsets are empty, do not begin at 0, fall, or do not end at the number of edges.
    #[error("the offsets do not fit the edges: at index `{index}`")]
    Offsets {
        /// Index of the first offset that is wrong.
        index: usize,
    },
    /// An edge has an end that is no node of the graph.
    #[error("no such node: `{node}` (the graph has {n_nodes})")]
    NoSuchNode {
        /// The number that is too large.
        node: Node,
        /// Number of nodes of the graph.
        n_nodes: u32,
    },
    /// There are 2^31 nodes or more, or 2^32 - 1 edges or more.
    #[error("the graph is too large: `{nodes}` nodes, `{edges}` edges")]
    TooLarge {
        /// Number of nodes asked for.
        nodes: usize,
        /// Number of edges asked for.
        edges: usize,
    },
    /// A graph can grow only.
    #[error("the graph has more nodes than asked for: `{asked}` (it has {n_nodes})")]
    FewerNodes {
        /// Number of nodes asked for.
        asked: u32,
        /// Number of nodes of the graph.
        n_nodes: u32,
    },
}

/// The result of making a graph.
pub type Result<T, E = Error> = std::result::Result<T, E>;
