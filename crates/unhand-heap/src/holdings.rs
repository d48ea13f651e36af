//! Which variables keep which targets alive, and what comes free with each.
//!
//! The dominator tree answers most of it. A node below an owner's reach has the owners of its immediate dominator,
//! unless that is the root or an anchor. So owners need to be worked out for the *tops* only, the nodes right below
//! the root or an anchor in the tree, and everything below a top follows it.

use rustc_hash::FxHashMap;

use crate::owner_sets::{OwnerSets, SetId, spread};
use crate::parts::{Part, Tree};
use crate::{Dominators, Graph, NONE, Node, NodeSet, narrow};

/// An answer lists no more than this many owners of one [`Holding`].
pub const MAX_OWNERS: usize = 64;

/// Who holds these targets?
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Who refers to whom.
    pub graph: &'a Graph,
    /// The synthetic node that refers to every anchor and to whatever else lives of itself.
    pub root: Node,
    /// Nodes that have a name and stay: namespaces, classes, frames. Edges into an anchor count from the root only,
    /// because every function refers to its module's namespace and so everything would hold everything.
    pub anchors: &'a [Node],
    /// The nodes whose bytes matter, with their bytes. A node that comes twice counts once, with its first weight.
    pub targets: &'a [(Node, u64)],
}

/// A reference that can be cut: a variable. All edges from `anchor` to `child` are one owner.
///
/// `anchor` is the root when `child` is not an anchor and the root refers to it; also when `child` is an anchor that
/// is a target itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// Who refers: an anchor or the root.
    pub anchor: Node,
    /// To whom.
    pub child: Node,
}

/// Targets that the same owners keep alive.
///
/// With one owner and not more, `bytes` is what comes free when that reference is cut. With several, all of them must
/// be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The owners in ascending order, at most [`MAX_OWNERS`].
    pub owners: Vec<Owner>,
    /// Whether there are owners beyond those. Targets whose listed owners agree are then taken together.
    pub more_owners: bool,
    /// The targets in ascending order.
    pub targets: Vec<Node>,
    /// The bytes of the targets together.
    pub bytes: u64,
    /// Where the bytes are on the inside, in pre-order; see [`Part`].
    pub parts: Vec<Part>,
}

/// Who holds the targets of a [`Question`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The targets by their owners, largest first; of equal ones, the one with the smallest target first.
    pub holdings: Vec<Holding>,
    /// Targets that the root does not reach, ascending.
    pub unheld: Vec<Node>,
    /// Every owner that reaches a target, with the bytes it holds alone (0 when others share all it reaches), largest
    /// first; of equal ones, the smallest owner first.
    pub retained_by_owner: Vec<(Owner, u64)>,
}

/// Finds the owners of each target and gathers targets with the same owners.
///
/// Works on the ancestors of the targets only; dominators there are those of the whole graph, since every way to a
/// target stays among its ancestors. O((n + m) log n) for the ancestors, O(n + m) for the graph; sets of owners are
/// stored once each.
pub fn holdings(question: &Question<'_>) -> Answer {
    let &Question { graph, root, anchors, targets } = question;
    let anchors: NodeSet = anchors.iter().copied().filter(|&node| node != root).collect();
    let ancestors = ancestors(graph, root, &anchors, targets);
    let dominators = Dominators::within(graph, root, |is_from_root, head| {
        ancestors.contains(head) && (is_from_root || !anchors.contains(head))
    });

    let mut unheld = Vec::new();
    let mut weights = vec![0; dominators.node_of.len()];
    let mut is_target = vec![false; dominators.node_of.len()];
    for &(node, bytes) in targets {
        match dominators.number_of(node) {
            Some(number) if number != 0 => {
                let number = number as usize;
                if !std::mem::replace(&mut is_target[number], true) {
                    weights[number] = bytes;
                }
            }
            _ => unheld.push(node),
        }
    }
    unheld.sort_unstable();
    unheld.dedup();

    let tops = Tops::of(&dominators, &anchors);
    let owners = Owners::of(graph, &dominators, &tops, &is_target);
    let mut sets = OwnerSets::new(MAX_OWNERS);
    let sets_of_tops = owners.spread(graph, &dominators, &tops, &mut sets);

    // Gather, in the order of the nodes.
    let mut by_node: Vec<(Node, u32)> = (0..)
        .zip(&is_target)
        .filter(|&(_, &is_target)| is_target)
        .map(|(number, _): (u32, _)| (dominators.node_of[number as usize], number))
        .collect();
    by_node.sort_unstable();
    let mut alone = vec![0_u64; owners.list.len()];
    let mut holdings: Vec<Holding> = Vec::new();
    let mut holding_of: FxHashMap<SetId, u32> = FxHashMap::default();
    for (node, number) in by_node {
        let set_id = match tops.index_of(number) {
            Some(top) => sets_of_tops[top as usize],
            // An anchor has one owner: that it is an anchor.
            None => owners.of_anchor(node, root).map_or(SetId::EMPTY, |owner| sets.single(owner)),
        };
        let index = *holding_of.entry(set_id).or_insert_with(|| {
            let set = sets.get(set_id);
            holdings.push(Holding {
                owners: set.owners.iter().map(|&owner| owners.list[owner as usize]).collect(),
                more_owners: set.has_more,
                targets: Vec::new(),
                bytes: 0,
                parts: Vec::new(),
            });
            narrow(holdings.len() - 1)
        });
        let holding = &mut holdings[index as usize];
        holding.targets.push(node);
        let bytes = weights[number as usize];
        holding.bytes = holding.bytes.saturating_add(bytes);
        if let [owner] = *sets.get(set_id).owners {
            alone[owner as usize] = alone[owner as usize].saturating_add(bytes);
        }
    }

    let holding_of_top: Vec<u32> =
        sets_of_tops.iter().map(|set| holding_of.get(set).copied().unwrap_or(NONE)).collect();
    let tree = Tree::of(&dominators, weights, &is_target, holdings.len(), |number| {
        tops.index_of(number).map(|top| holding_of_top[top as usize])
    });
    for (index, holding) in (0..).zip(&mut holdings) {
        holding.parts = tree.parts(index, holding.bytes);
    }

    holdings.sort_by_key(|holding| (std::cmp::Reverse(holding.bytes), holding.targets.first().copied()));
    let mut retained_by_owner: Vec<(Owner, u64)> = owners.list.into_iter().zip(alone).collect();
    retained_by_owner.sort_by_key(|&(owner, bytes)| (std::cmp::Reverse(bytes), owner));
    Answer { holdings, unheld, retained_by_owner }
}

/// The nodes from which a target can be reached, targets included, without going into an anchor.
fn ancestors(graph: &Graph, root: Node, anchors: &NodeSet, targets: &[(Node, u64)]) -> NodeSet {
    let backwards = graph.transposed();
    let mut found = NodeSet::new(graph.n_nodes());
    let mut waiting = Vec::new();
    for &(node, _) in targets {
        if node < graph.n_nodes() && found.insert(node) {
            waiting.push(node);
        }
    }
    // First in, first out, as in `reachable`.
    let mut n_done = 0;
    while let Some(&node) = waiting.get(n_done) {
        n_done += 1;
        // An anchor is referred to by the root, as far as we are concerned, and the root by nobody.
        if node == root || anchors.contains(node) {
            continue;
        }
        for &before in backwards.successors(node) {
            if found.insert(before) {
                waiting.push(before);
            }
        }
    }
    // The search for dominators begins there, and nothing leads back.
    found.remove(root);
    found
}

/// The nodes right below the root or an anchor in the dominator tree, and for every other node the one it is under.
struct Tops {
    /// By number: the index of the top, `NONE` for the root and the anchors.
    index: Vec<u32>,
    n_tops: u32,
}

impl Tops {
    fn of(dominators: &Dominators, anchors: &NodeSet) -> Tops {
        let mut index: Vec<u32> = Vec::with_capacity(dominators.node_of.len());
        let mut n_tops = 0;
        for (number, &node) in (0..).zip(&dominators.node_of) {
            if number == 0 || anchors.contains(node) {
                index.push(NONE);
                continue;
            }
            let above = index[dominators.idom[number] as usize];
            if above == NONE {
                index.push(n_tops);
                n_tops += 1;
            } else {
                index.push(above);
            }
        }
        Tops { index, n_tops }
    }

    fn index_of(&self, number: u32) -> Option<u32> {
        Some(self.index[number as usize]).filter(|&index| index != NONE)
    }
}

/// The owners that reach a target, ascending.
struct Owners {
    list: Vec<Owner>,
}

impl Owners {
    fn of(graph: &Graph, dominators: &Dominators, tops: &Tops, is_target: &[bool]) -> Owners {
        let mut list = Vec::new();
        for (number, &anchor) in (0..).zip(&dominators.node_of) {
            if tops.index_of(number).is_some() {
                continue;
            }
            for &child in graph.successors(anchor) {
                let Some(found) = dominators.number_of(child) else { continue };
                let is_anchor = tops.index_of(found).is_none();
                if !is_anchor || (number == 0 && found != 0 && is_target[found as usize]) {
                    list.push(Owner { anchor, child });
                }
            }
        }
        list.sort_unstable();
        list.dedup();
        Owners { list }
    }

    fn of_anchor(&self, anchor: Node, root: Node) -> Option<u32> {
        self.list.binary_search(&Owner { anchor: root, child: anchor }).ok().map(narrow)
    }

    /// By top: the owners that reach it.
    fn spread(
        &self,
        graph: &Graph,
        dominators: &Dominators,
        tops: &Tops,
        sets: &mut OwnerSets,
    ) -> Vec<SetId> {
        // What is below a top can be entered through the top only: of the edges, those into a top are left.
        let mut edges = Vec::new();
        for (number, &node) in (0..).zip(&dominators.node_of) {
            let Some(from) = tops.index_of(number) else { continue };
            for &next in graph.successors(node) {
                let to = dominators.number_of(next).and_then(|next| tops.index_of(next));
                if let Some(to) = to.filter(|&to| to != from) {
                    edges.push((from, to));
                }
            }
        }
        let graph = Graph::gather(tops.n_tops, || edges.iter().copied());
        let owned = (0..).zip(&self.list).filter_map(|(owner, &Owner { child, .. })| {
            let number = dominators.number_of(child)?;
            Some((owner, tops.index_of(number)?))
        });
        spread(&graph, owned, sets)
    }
}
