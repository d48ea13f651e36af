//! Who holds which targets, against brute force: each owner followed for itself, each reference really cut.

mod support;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use proptest::prelude::*;
use support::{graph_of, graphs, reach_by};
use unhand_heap::{Answer, Node, Owner, Part, Question, holdings};

const N_NODES: u32 = 18;

/// A heap as lists: the root is node 0.
#[derive(Clone, Debug)]
struct Heap {
    edges: Vec<(Node, Node)>,
    anchors: Vec<Node>,
    targets: Vec<(Node, u64)>,
}

impl Heap {
    fn answer(&self) -> Answer {
        let graph = graph_of(N_NODES, &self.edges);
        holdings(&Question { graph: &graph, root: 0, anchors: &self.anchors, targets: &self.targets })
    }

    /// The edges that count.
    fn effective(&self) -> Vec<(Node, Node)> {
        let counts = |&(from, to): &(Node, Node)| to != 0 && (from == 0 || !self.anchors.contains(&to));
        self.edges.iter().copied().filter(counts).collect()
    }

    fn reach(&self, cut: impl Fn(Node, Node) -> bool) -> Vec<bool> {
        reach_by(N_NODES, &[0], &self.effective(), |from, to| !cut(from, to))
    }

    /// Every owner, whether it reaches a target or not.
    fn owners(&self) -> Vec<Owner> {
        let all = self.reach(|_, _| false);
        let is_anchor = |node: Node| node == 0 || self.anchors.contains(&node);
        let mut owners: Vec<Owner> = self
            .effective()
            .into_iter()
            .filter(|&(anchor, child)| all[anchor as usize] && is_anchor(anchor) && !is_anchor(child))
            .map(|(anchor, child)| Owner { anchor, child })
            .collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    /// By owners: the targets and their bytes.
    fn groups(&self) -> BTreeMap<Vec<Owner>, BTreeMap<Node, u64>> {
        let all = self.reach(|_, _| false);
        let owners: Vec<(Owner, Vec<bool>)> = self
            .owners()
            .into_iter()
            .map(|owner| (owner, reach_by(N_NODES, &[owner.child], &self.effective(), |_, _| true)))
            .collect();
        let mut groups: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for &(target, bytes) in self.targets.iter().filter(|&&(node, _)| node != 0 && all[node as usize]) {
            let own = if self.anchors.contains(&target) {
                vec![Owner { anchor: 0, child: target }]
            } else {
                let reaching = owners.iter().filter(|(_, reached)| reached[target as usize]);
                reaching.map(|&(owner, _)| owner).collect()
            };
            groups.entry(own).or_default().entry(target).or_insert(bytes);
        }
        groups
    }

    /// By node: whether it dominates the other, strictly. By definition.
    fn dominates(&self) -> Vec<Vec<bool>> {
        let all = self.reach(|_, _| false);
        let without = |cut: Node| self.reach(move |from, to| from == cut || to == cut);
        let row = |cut: Node| {
            let left = without(cut);
            (0..N_NODES).map(|node| node != cut && all[node as usize] && !left[node as usize]).collect()
        };
        (0..N_NODES).map(row).collect()
    }

    /// The parts of a holding, as the rules say. There are too few nodes here for more than 24.
    fn parts(&self, targets: &BTreeMap<Node, u64>) -> Vec<Part> {
        let dominates = self.dominates();
        let is_target = |node: Node| self.targets.iter().any(|&(target, _)| target == node);
        let below = |node: Node| -> Vec<Node> {
            targets.keys().copied().filter(|&target| dominates[node as usize][target as usize]).collect()
        };
        let nodes: Vec<Node> = (1..N_NODES)
            .filter(|&node| !self.anchors.contains(&node) && !is_target(node) && !below(node).is_empty())
            .collect();
        // The nodes right below another, or right below none.
        let inside = |around: Option<Node>| -> Vec<Node> {
            let above = |node: Node| -> Vec<Node> {
                nodes.iter().copied().filter(|&other| dominates[other as usize][node as usize]).collect()
            };
            let n_above = |node: Node| above(node).len();
            nodes
                .iter()
                .copied()
                .filter(|&node| match around {
                    None => n_above(node) == 0,
                    Some(around) => above(node).contains(&around) && n_above(node) == n_above(around) + 1,
                })
                .collect()
        };
        let bytes_of = |node: Node| -> u64 { below(node).iter().map(|target| targets[target]).sum() };
        let total: u64 = targets.values().sum();
        let mut parts = Vec::new();
        let mut waiting: Vec<(Option<Node>, Option<u32>, u32)> = vec![(None, None, 0)];
        while let Some((mut around, parent, level)) = waiting.pop() {
            let mut index = None;
            if let Some(node) = &mut around {
                while let Some(&deeper) =
                    inside(Some(*node)).iter().find(|&&next| below(next) == below(*node))
                {
                    *node = deeper;
                }
                index = Some(u32::try_from(parts.len()).expect("few"));
                let n_targets = u32::try_from(below(*node).len()).expect("few");
                parts.push(Part { node: *node, parent, bytes: bytes_of(*node), n_targets });
            }
            let mut next = inside(around);
            next.sort_by_key(|&node| (Reverse(bytes_of(node)), node));
            let shown = next
                .into_iter()
                .enumerate()
                .filter(|&(rank, node)| level < 4 && (rank < 8 || bytes_of(node) * 50 >= total));
            let shown: Vec<_> = shown.map(|(_, node)| (Some(node), index, level + 1)).collect();
            waiting.extend(shown.into_iter().rev());
        }
        parts
    }
}

fn heaps() -> impl Strategy<Value = Heap> {
    // Few edges from many nodes, so that there is something to dominate; anchors that nobody refers to now and then.
    let edges = prop_oneof![graphs(N_NODES, 30), graphs(N_NODES, 60)];
    let tree = prop::collection::vec(any::<u16>(), 0..N_NODES as usize);
    let weight = prop_oneof![1 => Just(0), 4 => 1..5_u64, 4 => 100..1000_u64];
    let targets = prop::collection::vec((0..N_NODES, weight), 0..10);
    (edges, tree, prop::collection::vec(1..5_u32, 0..4), targets, 0..10_u8).prop_map(
        |(mut edges, tree, anchors, targets, detached)| {
            edges.extend((1..).zip(tree).map(|(node, above)| (u32::from(above) % node, node)));
            if detached > 0 {
                edges.extend(anchors.iter().map(|&anchor| (0, anchor)));
            }
            Heap { edges, anchors, targets }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn prop_the_owners_of_a_target_are_those_that_reach_it(heap in heaps()) {
        let answer = heap.answer();
        let mut expected: Vec<_> = heap
            .groups()
            .into_iter()
            .map(|(owners, targets)| {
                (targets.values().sum::<u64>(), targets.keys().copied().collect::<Vec<_>>(), owners)
            })
            .collect();
        expected.sort_by_key(|(bytes, targets, _)| (Reverse(*bytes), targets[0]));
        let found: Vec<_> =
            answer.holdings.iter().map(|it| (it.bytes, it.targets.clone(), it.owners.clone())).collect();
        prop_assert_eq!(found, expected);
        prop_assert!(answer.holdings.iter().all(|holding| !holding.more_owners));
        let all = heap.reach(|_, _| false);
        let mut unheld: Vec<Node> =
            heap.targets.iter().map(|it| it.0).filter(|&node| node == 0 || !all[node as usize]).collect();
        unheld.sort_unstable();
        unheld.dedup();
        prop_assert_eq!(answer.unheld, unheld);
    }

    #[test]
    fn prop_the_bytes_of_an_owner_come_free_when_it_is_cut(heap in heaps()) {
        let mut targets: BTreeMap<Node, u64> = BTreeMap::new();
        for &(node, bytes) in &heap.targets {
            targets.entry(node).or_insert(bytes);
        }
        let all = heap.reach(|_, _| false);
        let mut expected = Vec::new();
        for owner in heap.owners() {
            let reached = reach_by(N_NODES, &[owner.child], &heap.effective(), |_, _| true);
            if targets.keys().all(|&target| !reached[target as usize]) {
                continue;
            }
            let left = heap.reach(|from, to| (from, to) == (owner.anchor, owner.child));
            let lost = targets.iter().filter(|&(&node, _)| node != 0 && all[node as usize] && !left[node as usize]);
            expected.push((owner, lost.map(|(_, bytes)| bytes).sum::<u64>()));
        }
        // An anchor that is a target is its own, whatever else would go with it.
        for (&anchor, &bytes) in targets.iter().filter(|(node, _)| heap.anchors.contains(node)) {
            if all[anchor as usize] {
                expected.push((Owner { anchor: 0, child: anchor }, bytes));
            }
        }
        expected.sort_by_key(|&(owner, bytes)| (Reverse(bytes), owner));
        prop_assert_eq!(heap.answer().retained_by_owner, expected);
    }

    #[test]
    fn prop_parts_are_the_dominators_that_the_rules_leave(heap in heaps()) {
        let groups = heap.groups();
        for holding in heap.answer().holdings {
            prop_assert_eq!(&holding.parts, &heap.parts(&groups[&holding.owners]), "{:?}", holding.owners);
        }
    }

    #[test]
    fn prop_the_order_of_edges_anchors_and_targets_changes_nothing(
        heap in heaps(),
        seed in prop::collection::vec(any::<u32>(), 60),
    ) {
        let mut other = heap.clone();
        for (index, &random) in seed.iter().enumerate() {
            if !other.edges.is_empty() {
                let n_edges = other.edges.len();
                other.edges.swap(index % n_edges, random as usize % n_edges);
            }
        }
        other.anchors.reverse();
        other.targets.sort_by_key(|&(node, _)| Reverse(node)); // Stable: the first weight of a node stays the first.
        prop_assert_eq!(heap.answer(), other.answer());
    }
}
