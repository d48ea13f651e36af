//! Directed graphs in compressed rows: for each node its successors, all in one array.

use crate::{Error, NONE, NodeSet, Result, narrow};

/// The number of a node, from 0.
pub type Node = u32;

/// A directed graph that does not change, in compressed sparse rows (CSR).
///
/// The successors of node `v` are `successors[offsets[v] .. offsets[v + 1]]`: 4 bytes a node and 4 bytes an edge.
/// An edge may be there several times and stays so, since reference counts count each; self loops too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    offsets: Vec<u32>,
    successors: Vec<Node>,
}

impl Graph {
    /// A graph from its two arrays. `offsets` has one entry more than there are nodes, begins at 0, never falls and
    /// ends at the number of edges. O(n + m) to check it; nothing is copied.
    pub fn from_csr(offsets: Vec<u32>, successors: Vec<Node>) -> Result<Graph> {
        let Some(n_nodes) = offsets.len().checked_sub(1) else { return Err(Error::Offsets { index: 0 }) };
        let n_nodes = countable(n_nodes, successors.len())?;
        if offsets[0] != 0 {
            return Err(Error::Offsets { index: 0 });
        }
        if let Some(index) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return Err(Error::Offsets { index: index + 1 });
        }
        if offsets[n_nodes as usize] as usize != successors.len() {
            return Err(Error::Offsets { index: n_nodes as usize });
        }
        match successors.iter().find(|&&node| node >= n_nodes) {
            Some(&node) => Err(Error::NoSuchNode { node, n_nodes }),
            None => Ok(Graph { offsets, successors }),
        }
    }

    /// A graph from a list of edges, `(from, to)`. The successors of a node keep the order of the list. O(n + m).
    pub fn from_edges(n_nodes: u32, edges: &[(Node, Node)]) -> Result<Graph> {
        check(n_nodes, 0, edges)?;
        Ok(Graph::gather(n_nodes, || edges.iter().copied()))
    }

    /// This graph with more nodes and edges. `n_nodes` is the new number of nodes; the successors of a node are the
    /// old ones, then the new ones in the order of the list. O(n + m + k log k) for k new edges; what lies between two
    /// nodes with new edges is copied in one piece.
    pub fn with_edges(&self, n_nodes: u32, edges: &[(Node, Node)]) -> Result<Graph> {
        if n_nodes < self.n_nodes() {
            return Err(Error::FewerNodes { asked: n_nodes, n_nodes: self.n_nodes() });
        }
        check(n_nodes, self.n_edges(), edges)?;
        let mut edges = edges.to_vec();
        edges.sort_by_key(|&(from, _)| from);
        let mut offsets = Vec::with_capacity(n_nodes as usize + 1);
        let mut successors = Vec::with_capacity(self.n_edges() + edges.len());
        // The nodes before `done` have their offset, and the old edges before `copied` are there.
        let (mut done, mut copied) = (0, 0);
        let old_offset =
            |node: Node| self.offsets.get(node as usize).copied().unwrap_or(narrow(self.n_edges()));
        let offsets_up_to = |offsets: &mut Vec<u32>, done: Node, end: Node, n_added: usize| {
            offsets.extend((done..end).map(|node| old_offset(node) + narrow(n_added)));
        };
        for (n_added, &(from, to)) in edges.iter().enumerate() {
            // A node begins after the new edges of those before it.
            offsets_up_to(&mut offsets, done, from + 1, n_added);
            done = done.max(from + 1);
            let end = old_offset(from + 1);
            successors.extend_from_slice(&self.successors[copied as usize..end as usize]);
            copied = end;
            successors.push(to);
        }
        successors.extend_from_slice(&self.successors[copied as usize..]);
        offsets_up_to(&mut offsets, done, n_nodes + 1, edges.len());
        Ok(Graph { offsets, successors })
    }

    /// What a node refers to, duplicates included; nothing for a node that is not there. O(1).
    #[inline]
    pub fn successors(&self, node: Node) -> &[Node] {
        let (from, to) = self.range(node);
        &self.successors[from as usize..to as usize]
    }

    /// Number of nodes. O(1).
    pub fn n_nodes(&self) -> u32 {
        narrow(self.offsets.len() - 1)
    }

    /// Number of edges, duplicates counted. O(1).
    pub fn n_edges(&self) -> usize {
        self.successors.len()
    }

    /// All edges, `(from, to)`, in the order of the nodes they come from. O(n + m) for all.
    pub fn edges(&self) -> impl Iterator<Item = (Node, Node)> + '_ {
        (0..self.n_nodes()).flat_map(|from| self.successors(from).iter().map(move |&to| (from, to)))
    }

    /// The graph with every edge turned round: the successors of a node are who refers to it, ascending. O(n + m).
    #[must_use]
    pub fn transposed(&self) -> Graph {
        Graph::gather(self.n_nodes(), || self.edges().map(|(from, to)| (to, from)))
    }

    /// The graph without the edges whose head is in `cut`, except those whose tail is `except_from`. O(n + m).
    #[must_use]
    pub fn without_edges_into(&self, cut: &NodeSet, except_from: Node) -> Graph {
        let mut offsets = Vec::with_capacity(self.offsets.len());
        let mut successors = Vec::with_capacity(self.successors.len());
        offsets.push(0);
        for node in 0..self.n_nodes() {
            let kept = self.successors(node).iter().filter(|&&to| node == except_from || !cut.contains(to));
            successors.extend(kept);
            offsets.push(narrow(successors.len()));
        }
        Graph { offsets, successors }
    }

    /// How often each node is referred to, duplicates counted. O(n + m).
    pub fn in_degrees(&self) -> Vec<u32> {
        let mut degrees = vec![0; self.n_nodes() as usize];
        for &to in &self.successors {
            degrees[to as usize] += 1;
        }
        degrees
    }

    /// Where the successors of a node begin and end in the array of edges.
    #[inline]
    pub(crate) fn range(&self, node: Node) -> (u32, u32) {
        match self.offsets.get(node as usize..) {
            Some(&[from, to, ..]) => (from, to),
            _ => (0, 0),
        }
    }

    /// The head of an edge, by its place in the array of edges.
    #[inline]
    pub(crate) fn head(&self, edge: u32) -> Node {
        self.successors[edge as usize]
    }

    /// A graph from edges that are gone through twice. They are in range and countable: the callers check.
    pub(crate) fn gather<I: Iterator<Item = (Node, Node)>>(n_nodes: u32, edges: impl Fn() -> I) -> Graph {
        let mut offsets = vec![0; n_nodes as usize + 1];
        for (from, _) in edges() {
            offsets[from as usize] += 1;
        }
        let mut n_edges = 0;
        for offset in &mut offsets {
            n_edges += std::mem::replace(offset, n_edges);
        }
        let mut successors = vec![0; n_edges as usize];
        for (from, to) in edges() {
            let place = &mut offsets[from as usize];
            successors[*place as usize] = to;
            *place += 1;
        }
        // Each offset has moved to where the next one began.
        offsets.rotate_right(1);
        offsets[0] = 0;
        Graph { offsets, successors }
    }
}

/// Checks that nodes and edges can be counted: edges in 32 bits with one value to spare for "none", and nodes in 31, so
/// that there are numbers for something of each node as well.
fn countable(n_nodes: usize, n_edges: usize) -> Result<u32> {
    match u32::try_from(n_nodes) {
        Ok(nodes) if nodes <= NONE / 2 && n_edges < NONE as usize => Ok(nodes),
        _ => Err(Error::TooLarge { nodes: n_nodes, edges: n_edges }),
    }
}

fn check(n_nodes: u32, n_more_edges: usize, edges: &[(Node, Node)]) -> Result<()> {
    countable(n_nodes as usize, n_more_edges + edges.len())?;
    match edges.iter().map(|&(from, to)| from.max(to)).find(|&node| node >= n_nodes) {
        Some(node) => Err(Error::NoSuchNode { node, n_nodes }),
        None => Ok(()),
    }
}
