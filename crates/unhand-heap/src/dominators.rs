//! Dominators: who stands on every way from the root to a node, hence what comes free with what.
//!
//! Semi-NCA, after Georgiadis, "Linear-Time Algorithms for Dominators and Related Problems" (2005), section 2.3:
//! semidominators as Lengauer and Tarjan compute them, with path compression, then the immediate dominator of each
//! node as the nearest common ancestor of its parent and its semidominator in the tree made so far.
//!
//! Everything happens in the numbering of one depth first search, so that arrays are gone through in order. Of the
//! edges, only those that lead to a smaller number need the path compression. Those of the tree and those that lead
//! forward give their part while the search passes them, and a heap is nearly a tree: few edges are left to store.

use std::collections::BinaryHeap;

use crate::{Graph, NONE, Node, narrow};

/// The dominator tree of what a root reaches.
///
/// `a` dominates `b` when every way from the root to `b` goes through `a`: without `a`, `b` would be unreachable. The
/// nearest such node is the *immediate* dominator, and they make a tree. 4 bytes for each node of the graph, 8 for
/// each that is reachable.
#[derive(Clone, Debug)]
pub struct Dominators {
    /// By node: its number in the order of the search; `NONE` when the root does not reach it.
    pub(crate) number: Vec<u32>,
    /// By number: the node.
    pub(crate) node_of: Vec<Node>,
    /// By number: the number of the immediate dominator, which is smaller. The root has itself.
    pub(crate) idom: Vec<u32>,
}

impl Dominators {
    /// The dominators of everything that `root` reaches. O(m log n) at worst and nearly linear in practice. While
    /// it works, 4 bytes for each node, 20 for each reachable one, 12 for each edge that leads back or across, and 12
    /// for each node that the search has open. No recursion.
    pub fn of(graph: &Graph, root: Node) -> Dominators {
        Dominators::within(graph, root, |_, _| true)
    }

    /// The same for the part of the graph whose edges satisfy `is_kept(the tail is the root, head)`.
    pub(crate) fn within(graph: &Graph, root: Node, is_kept: impl Fn(bool, Node) -> bool) -> Dominators {
        let Search { number, node_of, parent, mut semi, late } = Search::of(graph, root, is_kept);
        semidominators(&parent, &mut semi, &late);
        drop(late);
        let idom = immediate(parent, &semi);
        Dominators { number, node_of, idom }
    }

    /// The immediate dominator; `None` for the root and for what it does not reach. O(1).
    pub fn immediate(&self, node: Node) -> Option<Node> {
        let number = self.number_of(node).filter(|&number| number != 0)?;
        Some(self.node_of[self.idom[number as usize] as usize])
    }

    /// Whether the root reaches a node. O(1).
    pub fn is_reachable(&self, node: Node) -> bool {
        self.number_of(node).is_some()
    }

    /// By node: its weight plus the weights of all nodes it dominates, which is what comes free when the last
    /// reference to it goes.
    ///
    /// A node that the root does not reach has its own weight only. Weights that are missing are 0; sums stop at the
    /// largest number there is. O(n).
    pub fn retained(&self, weights: &[u64]) -> Vec<u64> {
        let mut retained = vec![0; self.number.len()];
        let n_given = weights.len().min(retained.len());
        retained[..n_given].copy_from_slice(&weights[..n_given]);
        for (&node, &above) in self.node_of.iter().zip(&self.idom).skip(1).rev() {
            let bytes = retained[node as usize];
            let sum = &mut retained[self.node_of[above as usize] as usize];
            *sum = sum.saturating_add(bytes);
        }
        retained
    }

    /// The nearest node that dominates all of `nodes`, each node counting as its own dominator.
    ///
    /// `None` when there are no nodes, or the root does not reach one of them. O(d log k) for k nodes with d different
    /// dominators up to the common one.
    pub fn common(&self, nodes: &[Node]) -> Option<Node> {
        let mut waiting = BinaryHeap::with_capacity(nodes.len());
        for &node in nodes {
            waiting.push(self.number_of(node)?);
        }
        // The largest number cannot dominate any other, so it gives way to its dominator until one is left.
        loop {
            let largest = waiting.pop()?;
            while waiting.peek() == Some(&largest) {
                waiting.pop();
            }
            if waiting.is_empty() {
                return Some(self.node_of[largest as usize]);
            }
            waiting.push(self.idom[largest as usize]);
        }
    }

    /// Adds what each node has to its dominators, by number.
    pub(crate) fn sum_up(&self, sums: &mut [u64]) {
        for number in (1..sums.len()).rev() {
            let sum = sums[number];
            let above = &mut sums[self.idom[number] as usize];
            *above = above.saturating_add(sum);
        }
    }

    pub(crate) fn number_of(&self, node: Node) -> Option<u32> {
        self.number.get(node as usize).copied().filter(|&number| number != NONE)
    }
}

/// What a depth first search leaves behind, in its own numbering.
struct Search {
    number: Vec<u32>,
    node_of: Vec<Node>,
    /// By number: the number of the parent in the tree of the search.
    parent: Vec<u32>,
    /// By number: the smallest number with an edge here, of the numbers that are smaller than this one.
    semi: Vec<u32>,
    /// The edges to a smaller number, back or across.
    late: Vec<Late>,
}

#[derive(Clone, Copy)]
struct Late {
    from: u32,
    to: u32,
}

/// A node whose successors have not all been looked at: its number, and the edges that are left.
struct Frame {
    number: u32,
    edge: u32,
    end: u32,
}

impl Search {
    fn of(graph: &Graph, root: Node, is_kept: impl Fn(bool, Node) -> bool) -> Search {
        let mut number = vec![NONE; graph.n_nodes() as usize];
        let (mut node_of, mut parent, mut semi, mut late) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut waiting: Vec<Frame> = Vec::new();
        if root < graph.n_nodes() {
            number[root as usize] = 0;
            node_of.push(root);
            parent.push(0);
            semi.push(0);
            let (edge, end) = graph.range(root);
            waiting.push(Frame { number: 0, edge, end });
        }
        while let Some(Frame { number: mut at, mut edge, mut end }) = waiting.pop() {
            while edge < end {
                let head = graph.head(edge);
                edge += 1;
                if !is_kept(at == 0, head) {
                    continue;
                }
                let seen = number[head as usize];
                if seen == NONE {
                    // Only what has edges left is kept: a list goes down without a stack.
                    if edge < end {
                        waiting.push(Frame { number: at, edge, end });
                    }
                    let next = narrow(node_of.len());
                    number[head as usize] = next;
                    node_of.push(head);
                    parent.push(at);
                    semi.push(at);
                    at = next;
                    (edge, end) = graph.range(head);
                } else if seen > at {
                    let smallest = &mut semi[seen as usize];
                    *smallest = at.min(*smallest);
                } else if seen < at && seen != 0 {
                    late.push(Late { from: at, to: seen });
                }
            }
        }
        Search { number, node_of, parent, semi, late }
    }
}

/// A tree of numbers under path compression: each knows a number above it, and the smallest semidominator of what was
/// between.
#[derive(Clone, Copy)]
struct Link {
    ancestor: u32,
    label: u32,
}

/// Completes the semidominators: from the last number to the first, with what the late edges bring.
fn semidominators(parent: &[u32], semi: &mut [u32], late: &[Late]) {
    let mut links: Vec<Link> = parent.iter().map(|&ancestor| Link { ancestor, label: NONE }).collect();
    // The late edges of each head, as a list through one array. It begins in the label, which has no other use until
    // the head is done.
    let mut next = Vec::with_capacity(late.len());
    for (edge, &Late { to, .. }) in (0..).zip(late) {
        next.push(std::mem::replace(&mut links[to as usize].label, edge));
    }
    let mut way = Vec::new();
    for at in (1..parent.len()).rev() {
        let mut smallest = semi[at];
        let mut edge = links[at].label;
        while edge != NONE {
            smallest = smallest.min(label(&mut links, &mut way, late[edge as usize].from, narrow(at)));
            edge = next[edge as usize];
        }
        semi[at] = smallest;
        links[at].label = smallest;
    }
}

/// The smallest semidominator on the way from a number up to, but without, the first that is not above `limit`.
/// Shortens the way for whoever comes next.
fn label(links: &mut [Link], way: &mut Vec<u32>, from: u32, limit: u32) -> u32 {
    let mut top = from;
    while links[top as usize].ancestor > limit {
        way.push(top);
        top = links[top as usize].ancestor;
    }
    let Link { ancestor, label: mut smallest } = links[top as usize];
    while let Some(number) = way.pop() {
        let link = &mut links[number as usize];
        smallest = smallest.min(link.label);
        *link = Link { ancestor, label: smallest };
    }
    smallest
}

/// Turns parents into immediate dominators: the nearest dominator of the parent that is not below the semidominator.
fn immediate(parent: Vec<u32>, semi: &[u32]) -> Vec<u32> {
    let mut idom = parent;
    // Going up step by step is quadratic when many nodes hang below a long list and are referred to from its
    // beginning too. Rare, so the steps are counted, and when they are too many the rest jumps.
    let mut steps_left = 4 * idom.len();
    for number in 1..idom.len() {
        let mut above = idom[number];
        while above > semi[number] {
            if steps_left == 0 {
                return immediate_by_jumps(idom, semi, number);
            }
            steps_left -= 1;
            above = idom[above as usize];
        }
        idom[number] = above;
    }
    idom
}

/// The same from number `from` on, with a second pointer a node that skips many: O(log n) steps for each number.
///
/// The jumps are those of Myers, "An applicative random-access stack" (1983).
fn immediate_by_jumps(mut idom: Vec<u32>, semi: &[u32], from: usize) -> Vec<u32> {
    let mut depth = vec![0_u32; idom.len()];
    let mut jump = vec![0_u32; idom.len()];
    for number in 1..idom.len() {
        if number >= from {
            let mut above = idom[number];
            while above > semi[number] {
                let far = jump[above as usize];
                above = if far >= semi[number] { far } else { idom[above as usize] };
            }
            idom[number] = above;
        }
        let above = idom[number] as usize;
        let far = jump[above] as usize;
        depth[number] = depth[above] + 1;
        let is_balanced = depth[above] - depth[far] == depth[far] - depth[jump[far] as usize];
        jump[number] = if is_balanced { jump[far] } else { idom[number] };
    }
    idom
}
