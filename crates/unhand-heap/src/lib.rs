//! Who holds what in a graph of objects: dominators, retained bytes, paths. Pure, and knows no Python.
//!
//! A heap is a directed [`Graph`]: nodes are objects, an edge `a → b` says that `a` refers to `b`. A synthetic
//! *root* refers to what lives of itself. *Anchors* are things with a name that stay: module namespaces, classes,
//! running frames. *Targets* are the nodes whose bytes matter, each with a weight: storages on a GPU.
//!
//! | question | call | answer | cost (n nodes, m edges) |
//! |---|---|---|---|
//! | which variables keep the targets alive, and how many bytes each | [`holdings`] | [`Answer`] | O((n + m) log n) |
//! | what comes free with a node | [`Dominators::of`], [`Dominators::retained`] | bytes by node | O(m log n), O(n) |
//! | how does one get from here to there | [`shortest_path`], [`Paths`] | nodes | O(n + m) |
//! | what is alive that the root does not reach, and what is garbage | [`external_roots`] | [`Roots`] | O(n + m) |
//! | what does this reach | [`reachable`] | [`NodeSet`] | O(n + m) |
//! | which node is at this address | [`Places`] | a node | O(1) |
//!
//! ```
//! use unhand_heap::{Graph, Owner, Question, holdings};
//!
//! // root 0 → namespace 1; the namespace has `model` 2 and `history` 3, which share the storage 4.
//! let graph = Graph::from_edges(6, &[(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (3, 5)])?;
//! let answer = holdings(&Question { graph: &graph, root: 0, anchors: &[1], targets: &[(4, 100), (5, 20)] });
//!
//! assert_eq!(answer.holdings[0].bytes, 100);
//! assert_eq!(answer.holdings[0].owners, [Owner { anchor: 1, child: 2 }, Owner { anchor: 1, child: 3 }]);
//! assert_eq!(answer.retained_by_owner[0], (Owner { anchor: 1, child: 3 }, 20));
//! # Ok::<(), unhand_heap::Error>(())
//! ```
//!
//! Nothing here recurses: a linked list of millions of cells is a normal input. A node that a graph does not have
//! has no successors and is reachable from nowhere; it is never a panic.

#![forbid(unsafe_code)]

mod components;
mod dominators;
mod error;
mod graph;
mod holdings;
mod node_set;
mod owner_sets;
mod parts;
mod places;
mod reach;
mod roots;

pub use dominators::Dominators;
pub use error::{Error, Result};
pub use graph::{Graph, Node};
pub use holdings::{Answer, Holding, MAX_OWNERS, Owner, Question, holdings};
pub use node_set::NodeSet;
pub use parts::{MAX_PART_LEVELS, MAX_PARTS, Part};
pub use places::Places;
pub use reach::{Paths, reachable, shortest_path};
pub use roots::{IMMORTAL, Roots, external_roots};

/// No node, no number, no edge: the one value that none of them takes.
const NONE: u32 = u32::MAX;

/// A count or an index of nodes or edges, or of something there are fewer of. The constructors of [`Graph`] see to it
/// that those fit.
#[expect(clippy::cast_possible_truncation, reason = "counted when the graph was made")]
const fn narrow(count: usize) -> u32 {
    count as u32
}
