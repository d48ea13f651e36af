//! What a holding consists of on the inside: its dominator tree, cut down to what a person reads.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::{Dominators, Graph, NONE, Node, narrow};

/// A holding is explained in no more than this many parts.
pub const MAX_PARTS: usize = 24;

/// The parts of a holding are nested no deeper than this.
pub const MAX_PART_LEVELS: u32 = 4;

/// Of the parts in one place, this many are shown however small they are.
const ALWAYS_SHOWN: usize = 8;

/// Beyond those, a part is shown from one in this many of the bytes of the holding: 2 %.
const SHOWN_FROM: u128 = 50;

/// An object inside a holding, with the bytes that only it holds there.
///
/// Parts are nodes of the dominator tree above the targets; a target is never a part. A chain of nodes that hold the
/// same targets is one part, its deepest node: the last object before the storage, or before the ways part. The
/// first part is the nearest that all targets of the holding have in common; there are several without a parent when
/// only the root or an anchor is common to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The object.
    pub node: Node,
    /// Index of the part around it in the list of parts; it comes earlier.
    pub parent: Option<u32>,
    /// The bytes of all targets it dominates: what comes free with it.
    pub bytes: u64,
    /// How many targets that are.
    pub n_targets: u32,
}

/// The dominator tree without the targets, by number; above it a place for each holding.
pub(crate) struct Tree<'a> {
    dominators: &'a Dominators,
    bytes: Vec<u64>,
    n_targets: Vec<u32>,
    /// Who is right below whom. The numbers of the holdings follow those of the nodes.
    children: Graph,
}

/// A part that may be shown. The largest first, then the outermost, then the smallest node at its upper end.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    bytes: u64,
    level: Reverse<u32>,
    node: Reverse<Node>,
    number: u32,
    parent: Option<u32>,
}

impl<'a> Tree<'a> {
    /// `holding_of` says by number which holding the targets below a node belong to (`NONE` when there are none), and
    /// `None` for the root and the anchors.
    pub(crate) fn of(
        dominators: &'a Dominators,
        weights: Vec<u64>,
        is_target: &[bool],
        n_holdings: usize,
        holding_of: impl Fn(u32) -> Option<u32>,
    ) -> Tree<'a> {
        let mut bytes = weights;
        dominators.sum_up(&mut bytes);
        let mut n_targets: Vec<u32> = is_target.iter().map(|&is_target| u32::from(is_target)).collect();
        for number in (1..n_targets.len()).rev() {
            n_targets[dominators.idom[number] as usize] += n_targets[number];
        }
        // By number: the place for what is right below it. Below a target that is the place around the target.
        let n_nodes = narrow(n_targets.len());
        let mut place = vec![NONE; n_targets.len()];
        let mut edges = Vec::new();
        for number in 0..n_nodes {
            let at = number as usize;
            let Some(holding) = holding_of(number) else { continue };
            if n_targets[at] == 0 {
                continue;
            }
            let around = match place[dominators.idom[at] as usize] {
                NONE => n_nodes + holding,
                around => around,
            };
            if is_target[at] {
                place[at] = around;
            } else {
                place[at] = number;
                edges.push((around, number));
            }
        }
        // A number for each node and each holding, and there are no more holdings than targets.
        let children = Graph::gather(n_nodes + narrow(n_holdings), || edges.iter().copied());
        Tree { dominators, bytes, n_targets, children }
    }

    /// The parts of one holding, in pre-order, larger ones first.
    pub(crate) fn parts(&self, holding: u32, holding_bytes: u64) -> Vec<Part> {
        let mut waiting = BinaryHeap::new();
        self.offer(&mut waiting, narrow(self.n_targets.len()) + holding, None, 1, holding_bytes);
        // The largest that fit, each after the part around it.
        let mut chosen: Vec<Part> = Vec::new();
        while chosen.len() < MAX_PARTS
            && let Some(Candidate { number, parent, level: Reverse(level), .. }) = waiting.pop()
        {
            let number = self.deepest(number);
            let part = Some(narrow(chosen.len()));
            chosen.push(Part {
                node: self.dominators.node_of[number as usize],
                parent,
                bytes: self.bytes[number as usize],
                n_targets: self.n_targets[number as usize],
            });
            if level < MAX_PART_LEVELS {
                self.offer(&mut waiting, number, part, level + 1, holding_bytes);
            }
        }
        in_pre_order(&chosen)
    }

    /// Puts what is right below a place among the candidates, unless it is too small.
    fn offer(
        &self,
        waiting: &mut BinaryHeap<Candidate>,
        place: u32,
        parent: Option<u32>,
        level: u32,
        holding_bytes: u64,
    ) {
        let candidate = |&number: &u32| Candidate {
            bytes: self.bytes[number as usize],
            level: Reverse(level),
            node: Reverse(self.dominators.node_of[number as usize]),
            number,
            parent,
        };
        let mut candidates: Vec<Candidate> = self.children.successors(place).iter().map(candidate).collect();
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let is_shown = |&(rank, ref candidate): &(usize, Candidate)| {
            rank < ALWAYS_SHOWN || u128::from(candidate.bytes) * SHOWN_FROM >= u128::from(holding_bytes)
        };
        // What is after the first that is not shown is smaller still.
        waiting.extend(
            candidates.into_iter().enumerate().take_while(is_shown).take(MAX_PARTS).map(|(_, it)| it),
        );
    }

    /// The lower end of a chain of nodes that hold the same targets.
    fn deepest(&self, number: u32) -> u32 {
        let mut at = number;
        while let [below] = *self.children.successors(at)
            && self.n_targets[below as usize] == self.n_targets[at as usize]
        {
            at = below;
        }
        at
    }
}

/// Puts each part after the part around it and what is inside that before it. Siblings keep their order.
fn in_pre_order(chosen: &[Part]) -> Vec<Part> {
    let mut ordered: Vec<Part> = Vec::with_capacity(chosen.len());
    let mut waiting: Vec<(usize, Option<u32>)> = Vec::new();
    let inside =
        |around: Option<u32>| (0..chosen.len()).rev().filter(move |&index| chosen[index].parent == around);
    waiting.extend(inside(None).map(|index| (index, None)));
    while let Some((index, parent)) = waiting.pop() {
        let place = Some(narrow(ordered.len()));
        ordered.push(Part { parent, ..chosen[index] });
        waiting.extend(inside(Some(narrow(index))).map(|index| (index, place)));
    }
    ordered
}
