//! Sets of nodes, one bit a node.

use crate::Node;

/// A set of nodes: a bit for each node of the graph, so an eighth of a byte a node whether it is in or not.
///
/// It grows when a node is inserted that is larger than what it was made for.
#[derive(Clone, Debug, Default)]
pub struct NodeSet {
    words: Vec<u64>,
    n_members: usize,
}

impl NodeSet {
    /// The empty set, with room for the nodes below `n_nodes`. O(`n_nodes` / 64).
    pub fn new(n_nodes: u32) -> NodeSet {
        NodeSet { words: vec![0; (n_nodes as usize).div_ceil(64)], n_members: 0 }
    }

    /// Puts a node in. Whether it was new. O(1).
    pub fn insert(&mut self, node: Node) -> bool {
        let (index, bit) = place(node);
        if index >= self.words.len() {
            self.words.resize(index + 1, 0);
        }
        let word = &mut self.words[index];
        let is_new = *word & bit == 0;
        *word |= bit;
        self.n_members += usize::from(is_new);
        is_new
    }

    /// Takes a node out. Whether it was in. O(1).
    pub fn remove(&mut self, node: Node) -> bool {
        let (index, bit) = place(node);
        let Some(word) = self.words.get_mut(index).filter(|word| **word & bit != 0) else { return false };
        *word &= !bit;
        self.n_members -= 1;
        true
    }

    /// Whether a node is in. O(1).
    pub fn contains(&self, node: Node) -> bool {
        let (index, bit) = place(node);
        self.words.get(index).is_some_and(|word| word & bit != 0)
    }

    /// The members, in ascending order. O(room / 64 + members) for all.
    pub fn iter(&self) -> impl Iterator<Item = Node> + '_ {
        (0..).zip(&self.words).flat_map(|(index, &word): (u32, _)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// Number of members. O(1).
    pub fn len(&self) -> usize {
        self.n_members
    }

    /// Whether there are no members. O(1).
    pub fn is_empty(&self) -> bool {
        self.n_members == 0
    }
}

fn place(node: Node) -> (usize, u64) {
    (node as usize / 64, 1 << (node % 64))
}

impl PartialEq for NodeSet {
    /// Whether the members are the same; the room does not count.
    fn eq(&self, other: &NodeSet) -> bool {
        let n_shared = self.words.len().min(other.words.len());
        self.n_members == other.n_members && self.words[..n_shared] == other.words[..n_shared]
    }
}

impl Eq for NodeSet {}

impl Extend<Node> for NodeSet {
    fn extend<I: IntoIterator<Item = Node>>(&mut self, nodes: I) {
        for node in nodes {
            self.insert(node);
        }
    }
}

impl FromIterator<Node> for NodeSet {
    fn from_iter<I: IntoIterator<Item = Node>>(nodes: I) -> NodeSet {
        let mut set = NodeSet::default();
        set.extend(nodes);
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_each_member_once_and_lists_them_in_order() {
        let mut set = NodeSet::new(10);
        assert!(set.is_empty());
        for (node, is_new) in [(3, true), (700, true), (3, false), (64, true), (63, true), (0, true)] {
            assert_eq!(set.insert(node), is_new, "{node}");
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 3, 63, 64, 700]);
        assert_eq!(set.len(), 5);
        assert!(set.contains(700) && !set.contains(701) && !set.contains(u32::MAX));
    }

    #[test]
    fn sets_with_different_room_are_equal() {
        assert_eq!(
            NodeSet::from_iter([1, 2]),
            [2, 1, 1].into_iter().fold(NodeSet::new(900), |mut set, node| {
                set.insert(node);
                set
            })
        );
        assert_ne!(NodeSet::from_iter([1, 2]), NodeSet::from_iter([1, 200]));
    }
}
