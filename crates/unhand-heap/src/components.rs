//! Strongly connected components: what refers to one another in a circle. Tarjan's algorithm, without recursion.

use crate::{Graph, NONE, Node};

/// The components of a graph.
pub(crate) struct Components {
    /// By node: the number of its component. An edge between components leads from a larger to a smaller number.
    pub(crate) component_of: Vec<u32>,
    /// All nodes, component by component, in ascending order of the components.
    pub(crate) order: Vec<Node>,
}

impl Components {
    /// Tarjan, "Depth-first search and linear graph algorithms" (1972). O(n + m).
    pub(crate) fn of(graph: &Graph) -> Components {
        let n_nodes = graph.n_nodes();
        let mut components = Components {
            component_of: vec![NONE; n_nodes as usize],
            order: Vec::with_capacity(n_nodes as usize),
        };
        // By node: when it was found, and the earliest that it reaches of those without a component.
        let mut found = vec![NONE; n_nodes as usize];
        let mut low = vec![NONE; n_nodes as usize];
        let mut n_found = 0;
        let mut n_components = 0;
        let mut open: Vec<Node> = Vec::new();
        let mut waiting: Vec<(Node, u32)> = Vec::new();
        for start in 0..n_nodes {
            if found[start as usize] != NONE {
                continue;
            }
            waiting.push((start, graph.range(start).0));
            while let Some(&mut (node, ref mut edge)) = waiting.last_mut() {
                let at = node as usize;
                if found[at] == NONE {
                    found[at] = n_found;
                    low[at] = n_found;
                    n_found += 1;
                    open.push(node);
                }
                if *edge < graph.range(node).1 {
                    let head = graph.head(*edge);
                    *edge += 1;
                    if found[head as usize] == NONE {
                        waiting.push((head, graph.range(head).0));
                    } else if components.component_of[head as usize] == NONE {
                        low[at] = low[at].min(found[head as usize]);
                    }
                    continue;
                }
                waiting.pop();
                if let Some(&(before, _)) = waiting.last() {
                    low[before as usize] = low[before as usize].min(low[at]);
                }
                if low[at] == found[at] {
                    while let Some(member) = open.pop() {
                        components.component_of[member as usize] = n_components;
                        components.order.push(member);
                        if member == node {
                            break;
                        }
                    }
                    n_components += 1;
                }
            }
        }
        components
    }

    /// Number of components.
    pub(crate) fn len(&self) -> usize {
        self.order.last().map_or(0, |&node| self.component_of[node as usize] as usize + 1)
    }
}
