//! `Heap`: the captured graph as Python sees it, with nodes and edges that only Python knows of added to it.

use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use unhand_heap::{Dominators, Graph, NodeSet, Paths, Question, external_roots, holdings, reachable};

use crate::capture::{Capture, ROOT};

/// The objects of this process and who refers to whom, at one moment.
///
/// Nodes are integers. Node 0 is the root: the interpreter itself. While a heap exists it refers to every object in
/// it, so keep it for as short a time as possible.
#[pyclass(module = "unhand._native", frozen)]
pub(crate) struct Heap {
    capture: Capture,
}

/// Owners, whether there are more, targets, bytes, parts: see [`HeapGraph::holdings`].
type Holding = (Vec<(u32, u32)>, bool, Vec<u32>, u64, Vec<(u32, Option<u32>, u64, u32)>);

/// Holdings, targets nobody holds, and what each owner holds alone.
type Holdings = (Vec<Holding>, Vec<u32>, Vec<(u32, u32, u64)>);

/// A heap with everything added, ready for questions.
#[pyclass(module = "unhand._native", frozen)]
pub(crate) struct HeapGraph {
    graph: Graph,
    /// The same, each edge the other way round; made when it is first asked for.
    backwards: OnceLock<Graph>,
    anchors: Vec<u32>,
}

/// A set of nodes, which may be most of the heap: it stays out of Python until it is asked for.
#[pyclass(module = "unhand._native", frozen)]
pub(crate) struct Nodes {
    set: NodeSet,
}

#[pymethods]
impl Nodes {
    fn __contains__(&self, node: u32) -> bool {
        self.set.contains(node)
    }

    fn __len__(&self) -> usize {
        self.set.len()
    }

    /// The nodes, in ascending order.
    fn list(&self) -> Vec<u32> {
        self.set.iter().collect()
    }
}

fn error(error: &unhand_heap::Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymethods]
impl Heap {
    /// Take the graph now, from every object that the collector lists and from `seeds`, which it may not list when it
    /// has frozen them. The referents of the objects in `skip` are left out.
    #[new]
    #[pyo3(signature = (seeds=Vec::new(), skip=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn new(py: Python<'_>, seeds: Vec<Bound<'_, PyAny>>, skip: Vec<Bound<'_, PyAny>>) -> PyResult<Heap> {
        Ok(Heap { capture: Capture::take(py, &seeds, &skip)? })
    }

    /// How many nodes there are, the root included.
    #[getter]
    fn n_nodes(&self) -> u32 {
        self.capture.n_nodes()
    }

    /// How many references there are between them.
    #[getter]
    fn n_edges(&self) -> usize {
        self.capture.graph.n_edges()
    }

    /// The node of an object; None for one that was not there, or that the collector does not track.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn node(&self, object: Bound<'_, PyAny>) -> Option<u32> {
        self.capture.node(&object)
    }

    /// The object of a node; None for the root and for nodes that were added.
    fn object<'py>(&self, py: Python<'py>, node: u32) -> Option<Bound<'py, PyAny>> {
        self.capture.object(py, node)
    }

    /// Each type that has objects, and how many.
    fn types<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyAny>, usize)> {
        self.capture.types(py)
    }

    /// The nodes whose type is exactly one of these.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn instances(&self, types: Vec<Bound<'_, PyAny>>) -> Vec<u32> {
        self.capture.instances(&types)
    }

    /// The nodes an object refers to directly, with repetitions.
    fn referents(&self, node: u32) -> PyResult<Vec<u32>> {
        if node >= self.capture.n_nodes() {
            return Err(PyValueError::new_err(format!("no node `{node}`")));
        }
        Ok(self.capture.graph.successors(node).to_vec())
    }

    /// The graph with `n_added` nodes more, numbered from `n_nodes` on, and these edges more.
    ///
    /// `anchors` are nodes with a name of their own (namespaces of modules, classes, frames): references into them
    /// count only from the root. Nodes that only native code or a running expression refers to become children of
    /// the root.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn graph(
        &self,
        py: Python<'_>,
        n_added: u32,
        edges: Vec<(u32, u32)>,
        anchors: Vec<u32>,
    ) -> PyResult<HeapGraph> {
        let (captured, counts) = (&self.capture.graph, &self.capture.reference_counts);
        py.detach(|| {
            let n_nodes = captured.n_nodes() + n_added;
            let graph = captured.with_edges(n_nodes, &edges)?;
            let mut counts = counts.clone();
            // Whatever Python added it knows of itself: nothing else refers to it.
            counts.resize(n_nodes as usize, 0);
            let roots = external_roots(&graph, ROOT, &counts);
            let native: Vec<(u32, u32)> = roots.native.iter().map(|&node| (ROOT, node)).collect();
            let mut cut = NodeSet::new(n_nodes);
            for &anchor in anchors.iter().filter(|&&anchor| anchor < n_nodes) {
                cut.insert(anchor);
            }
            let graph = graph.with_edges(n_nodes, &native)?.without_edges_into(&cut, ROOT);
            Ok(HeapGraph { graph, backwards: OnceLock::new(), anchors })
        })
        .map_err(|cause| error(&cause))
    }
}

#[pymethods]
impl HeapGraph {
    /// Who holds the targets, given as (node, bytes).
    ///
    /// Returns (holdings, unheld, retained): holdings as (owners, more owners, targets, bytes, parts), where an owner
    /// is a pair (anchor, child) and a part is (node, index of its parent, bytes, targets); the targets nobody holds;
    /// and for each owner, as (anchor, child, bytes), what it holds alone.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn holdings(&self, py: Python<'_>, targets: Vec<(u32, u64)>) -> Holdings {
        let answer = py.detach(|| {
            let question =
                Question { graph: &self.graph, root: ROOT, anchors: &self.anchors, targets: &targets };
            holdings(&question)
        });
        let held = answer.holdings.into_iter().map(|holding| {
            let owners = holding.owners.iter().map(|owner| (owner.anchor, owner.child)).collect();
            let parts = holding
                .parts
                .iter()
                .map(|part| (part.node, part.parent, part.bytes, part.n_targets))
                .collect();
            (owners, holding.more_owners, holding.targets, holding.bytes, parts)
        });
        let retained = answer
            .retained_by_owner
            .iter()
            .map(|(owner, bytes)| (owner.anchor, owner.child, *bytes))
            .collect();
        (held.collect(), answer.unheld, retained)
    }

    /// The nodes that can be reached from these without leaving a closed node. Closed nodes are reached, not left.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn reachable(&self, py: Python<'_>, starts: Vec<u32>, closed: Vec<u32>) -> Nodes {
        py.detach(|| {
            let mut shut = NodeSet::new(self.graph.n_nodes());
            for node in closed {
                shut.insert(node);
            }
            Nodes { set: reachable(&self.graph, &starts, |node| !shut.contains(node)) }
        })
    }

    /// The nodes from which one of these can be reached.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn ancestors(&self, py: Python<'_>, ends: Vec<u32>) -> Nodes {
        py.detach(|| Nodes { set: reachable(self.backwards(), &ends, |_| true) })
    }

    /// A shortest path from each of `starts` to `end`, both included; None where there is none.
    fn paths_to(&self, py: Python<'_>, end: u32, starts: Vec<u32>) -> Vec<Option<Vec<u32>>> {
        py.detach(|| {
            let paths = Paths::from(self.backwards(), end);
            let to = |start| {
                let mut path = paths.to(start)?;
                path.reverse();
                Some(path)
            };
            starts.into_iter().map(to).collect()
        })
    }

    /// The nodes that refer to this one.
    fn referrers(&self, node: u32) -> PyResult<Vec<u32>> {
        if node >= self.graph.n_nodes() {
            return Err(PyValueError::new_err(format!("no node `{node}`")));
        }
        Ok(self.backwards().successors(node).to_vec())
    }

    /// The bytes each node retains: its own weight and the weights of all that it dominates, over the whole graph.
    #[expect(clippy::needless_pass_by_value, reason = "how an argument arrives from Python")]
    fn retained(&self, py: Python<'_>, weights: Vec<(u32, u64)>, nodes: Vec<u32>) -> Vec<u64> {
        py.detach(|| {
            let mut by_node = vec![0; self.graph.n_nodes() as usize];
            for (node, bytes) in weights {
                if let Some(weight) = by_node.get_mut(node as usize) {
                    *weight = bytes;
                }
            }
            let retained = Dominators::of(&self.graph, ROOT).retained(&by_node);
            nodes.iter().map(|&node| retained.get(node as usize).copied().unwrap_or(0)).collect()
        })
    }
}

impl HeapGraph {
    fn backwards(&self) -> &Graph {
        self.backwards.get_or_init(|| self.graph.transposed())
    }
}
