//! Sets of owners, each different set stored once, so that a million nodes with the same owners cost one.

use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::components::Components;
use crate::{Graph, Node, narrow};

/// A set of owners, by its place in [`OwnerSets`]. Equal sets have equal ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SetId(u32);

impl SetId {
    pub(crate) const EMPTY: SetId = SetId(0);
}

/// The smallest owners of a set, ascending, and whether there are more.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OwnerSet {
    pub(crate) owners: Rc<[u32]>,
    pub(crate) has_more: bool,
}

/// All different sets, and the unions made so far.
pub(crate) struct OwnerSets {
    max_owners: usize,
    sets: Vec<OwnerSet>,
    ids: FxHashMap<OwnerSet, SetId>,
    unions: FxHashMap<(SetId, SetId), SetId>,
}

impl OwnerSets {
    /// No set but the empty one. Sets keep their `max_owners` smallest owners.
    pub(crate) fn new(max_owners: usize) -> OwnerSets {
        let mut sets = OwnerSets {
            max_owners,
            sets: Vec::new(),
            ids: FxHashMap::default(),
            unions: FxHashMap::default(),
        };
        sets.id_of(OwnerSet { owners: Rc::new([]), has_more: false });
        sets
    }

    pub(crate) fn get(&self, id: SetId) -> &OwnerSet {
        &self.sets[id.0 as usize]
    }

    /// The set of one owner.
    pub(crate) fn single(&mut self, owner: u32) -> SetId {
        self.id_of(OwnerSet { owners: Rc::new([owner]), has_more: false })
    }

    /// The union. What is kept of it depends only on the members: the smallest of a union are among the smallest of
    /// its sides.
    pub(crate) fn union(&mut self, a: SetId, b: SetId) -> SetId {
        if a == b || b == SetId::EMPTY {
            return a;
        }
        if a == SetId::EMPTY {
            return b;
        }
        let key = (a.min(b), a.max(b));
        if let Some(&id) = self.unions.get(&key) {
            return id;
        }
        let (left, right) = (self.get(a), self.get(b));
        let mut owners = merge(&left.owners, &right.owners);
        let has_more = left.has_more || right.has_more || owners.len() > self.max_owners;
        owners.truncate(self.max_owners);
        let id = self.id_of(OwnerSet { owners: owners.into(), has_more });
        self.unions.insert(key, id);
        id
    }

    fn id_of(&mut self, set: OwnerSet) -> SetId {
        let next = SetId(narrow(self.sets.len()));
        let id = *self.ids.entry(set.clone()).or_insert(next);
        if id == next {
            self.sets.push(set);
        }
        id
    }
}

/// By node of `graph`: the owners that reach it, when `owned` says which owners refer to which node directly.
pub(crate) fn spread(
    graph: &Graph,
    owned: impl Iterator<Item = (u32, Node)>,
    sets: &mut OwnerSets,
) -> Vec<SetId> {
    let components = Components::of(graph);
    let mut of_component = vec![SetId::EMPTY; components.len()];
    for (owner, node) in owned {
        let set = &mut of_component[components.component_of[node as usize] as usize];
        let single = sets.single(owner);
        *set = sets.union(*set, single);
    }
    // From who refers to who is referred to: a component is complete before it hands on what it has.
    for &node in components.order.iter().rev() {
        let component = components.component_of[node as usize];
        let own = of_component[component as usize];
        for &next in graph.successors(node) {
            let set = &mut of_component[components.component_of[next as usize] as usize];
            *set = sets.union(*set, own);
        }
    }
    components.component_of.iter().map(|&component| of_component[component as usize]).collect()
}

fn merge(left: &[u32], right: &[u32]) -> Vec<u32> {
    let mut merged = Vec::with_capacity(left.len() + right.len());
    merged.extend_from_slice(left);
    merged.extend_from_slice(right);
    merged.sort_unstable();
    merged.dedup();
    merged
}
