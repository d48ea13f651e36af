//! Graphs: what was captured, what hangs on it, and what a replay does.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use super::emulate::Effect;
use crate::code::{Code, Outcome};

const FIRST_HANDLE: u64 = 0x6000_0000;

/// Something that can be put on a stream or into a graph.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    /// A place to depend on.
    Empty,
    /// A kernel, with what it does to memory as far as we know.
    Kernel(Option<Effect>),
    /// A call into a library, which computes nothing here.
    Library,
    /// Bytes from one place to another.
    Copy { target: u64, source: u64, bytes: u64 },
    /// The same row by row.
    CopyRows { target: u64, target_pitch: u64, source: u64, source_pitch: u64, bytes: u64, n_rows: u64 },
    /// A pattern of 1, 2 or 4 bytes, `count` times.
    Fill { target: u64, pattern: u32, width: u64, count: u64 },
    /// A function of the program.
    Host { function: u64, data: u64 },
    /// A function of the program that is told its stream.
    Callback { function: u64, stream: u64, data: u64 },
}

impl Work {
    /// The number by which CUDA names a kind of node.
    pub(crate) fn kind(&self) -> i32 {
        match self {
            Work::Kernel(_) | Work::Library => 0,
            Work::Copy { .. } | Work::CopyRows { .. } => 1,
            Work::Fill { .. } => 2,
            Work::Host { .. } | Work::Callback { .. } => 3,
            Work::Empty => 5,
        }
    }
}

/// One node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) work: Work,
    pub(crate) dependencies: Vec<u64>,
    graph: u64,
}

/// A function to call, and what to call it with, once nobody refers to an object any more.
pub(crate) type Destructor = (u64, u64);

#[derive(Default)]
pub(crate) struct Graphs {
    /// Graph → its nodes, in the order they were added.
    captured: HashMap<u64, Graph>,
    nodes: HashMap<u64, Node>,
    executables: HashMap<u64, Executable>,
    objects: HashMap<u64, Object>,
    last_handle: u64,
}

#[derive(Clone, Debug, Default)]
struct Graph {
    nodes: Vec<u64>,
    /// User object → how often the graph refers to it.
    objects: HashMap<u64, u64>,
}

/// A graph made ready: a copy, since the graph may be destroyed before.
#[derive(Clone, Debug)]
struct Executable {
    work: Vec<Work>,
    objects: HashMap<u64, u64>,
}

#[derive(Clone, Debug)]
struct Object {
    destructor: Destructor,
    n_references: u64,
}

impl Graphs {
    fn handle(&mut self) -> u64 {
        self.last_handle += 0x40;
        FIRST_HANDLE + self.last_handle
    }

    /// An empty graph.
    pub(crate) fn create(&mut self) -> u64 {
        let graph = self.handle();
        self.captured.insert(graph, Graph::default());
        graph
    }

    /// Adds a node after others.
    pub(crate) fn add(&mut self, graph: u64, work: Work, dependencies: Vec<u64>) -> Result<u64, Code> {
        let node = self.handle();
        self.captured.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.nodes.push(node);
        self.nodes.insert(node, Node { work, dependencies, graph });
        Ok(node)
    }

    /// The nodes of a graph in the order in which they were added.
    pub(crate) fn nodes(&self, graph: u64) -> Result<&[u64], Code> {
        self.captured.get(&graph).map(|graph| graph.nodes.as_slice()).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn node(&self, node: u64) -> Result<&Node, Code> {
        self.nodes.get(&node).ok_or(Code::INVALID_VALUE)
    }

    /// Whether every node of a graph comes before, or is among, `last`.
    pub(crate) fn is_covered_by(&self, graph: u64, last: &[u64]) -> bool {
        let mut seen: HashSet<u64> = HashSet::new();
        let mut open: Vec<u64> = last.to_vec();
        while let Some(node) = open.pop() {
            if seen.insert(node)
                && let Some(node) = self.nodes.get(&node)
            {
                open.extend(&node.dependencies);
            }
        }
        self.captured.get(&graph).is_none_or(|graph| graph.nodes.iter().all(|node| seen.contains(node)))
    }

    /// Makes a graph ready to run.
    pub(crate) fn instantiate(&mut self, graph: u64) -> Result<u64, Code> {
        let graph = self.captured.get(&graph).ok_or(Code::INVALID_VALUE)?.clone();
        let work = graph.nodes.iter().filter_map(|node| self.nodes.get(node)).map(|node| node.work.clone());
        let executable = Executable { work: work.collect(), objects: graph.objects.clone() };
        for (object, count) in &graph.objects {
            if let Some(object) = self.objects.get_mut(object) {
                object.n_references += count;
            }
        }
        let handle = self.handle();
        self.executables.insert(handle, executable);
        Ok(handle)
    }

    /// What a replay does, in an order that respects all dependencies: that of the capture.
    pub(crate) fn work(&self, executable: u64) -> Result<Vec<Work>, Code> {
        self.executables.get(&executable).map(|executable| executable.work.clone()).ok_or(Code::INVALID_VALUE)
    }

    /// `cudaGraphDestroy`. Returns what has to be called for objects that are gone with it.
    pub(crate) fn destroy(&mut self, graph: u64) -> Result<Vec<Destructor>, Code> {
        let graph = self.captured.remove(&graph).ok_or(Code::INVALID_VALUE)?;
        for node in &graph.nodes {
            self.nodes.remove(node);
        }
        Ok(self.release_all(&graph.objects))
    }

    /// `cudaGraphExecDestroy`
    pub(crate) fn destroy_executable(&mut self, executable: u64) -> Result<Vec<Destructor>, Code> {
        let executable = self.executables.remove(&executable).ok_or(Code::INVALID_VALUE)?;
        Ok(self.release_all(&executable.objects))
    }

    /// `cudaUserObjectCreate`
    pub(crate) fn create_object(&mut self, destructor: Destructor, n_references: u64) -> u64 {
        let handle = self.handle();
        self.objects.insert(handle, Object { destructor, n_references });
        handle
    }

    /// `cudaUserObjectRelease`
    pub(crate) fn release_object(&mut self, object: u64, count: u64) -> Result<Option<Destructor>, Code> {
        let entry = self.objects.get_mut(&object).ok_or(Code::INVALID_VALUE)?;
        entry.n_references = entry.n_references.saturating_sub(count);
        if entry.n_references > 0 {
            return Ok(None);
        }
        Ok(self.objects.remove(&object).map(|object| object.destructor))
    }

    /// `cudaGraphRetainUserObject`: the graph refers to it, with references of its own or the caller's.
    pub(crate) fn retain_object(&mut self, graph: u64, object: u64, count: u64, is_move: bool) -> Outcome {
        let graph = self.captured.get_mut(&graph).ok_or(Code::INVALID_VALUE)?;
        let entry = self.objects.get_mut(&object).ok_or(Code::INVALID_VALUE)?;
        if !is_move {
            entry.n_references += count;
        }
        *graph.objects.entry(object).or_default() += count;
        Ok(())
    }

    fn release_all(&mut self, objects: &HashMap<u64, u64>) -> Vec<Destructor> {
        objects
            .iter()
            .filter_map(|(object, count)| self.release_object(*object, *count).ok().flatten())
            .collect()
    }

    /// A picture of a graph for Graphviz.
    pub(crate) fn dot(&self, graph: u64) -> Result<String, Code> {
        let mut text = String::from("digraph captured {\n");
        for handle in self.nodes(graph)? {
            let node = self.node(*handle)?;
            let _ = writeln!(text, "  n{handle:x} [label=\"{}\"];", label(&node.work));
            for before in &node.dependencies {
                let _ = writeln!(text, "  n{before:x} -> n{handle:x};");
            }
        }
        Ok(text + "}\n")
    }

    /// The graph a node belongs to.
    pub(crate) fn graph_of(&self, node: u64) -> Option<u64> {
        self.nodes.get(&node).map(|node| node.graph)
    }
}

fn label(work: &Work) -> &'static str {
    match work {
        Work::Empty => "empty",
        Work::Kernel(_) => "kernel",
        Work::Library => "library call",
        Work::Copy { .. } | Work::CopyRows { .. } => "copy",
        Work::Fill { .. } => "fill",
        Work::Host { .. } | Work::Callback { .. } => "host",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_live_as_long_as_a_graph_or_an_executable_refers_to_them() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let object = graphs.create_object((7, 8), 1);
        graphs.retain_object(graph, object, 1, true).expect("both exist");
        let executable = graphs.instantiate(graph).expect("exists");
        assert_eq!(graphs.destroy(graph), Ok(vec![]));
        assert_eq!(graphs.destroy_executable(executable), Ok(vec![(7, 8)]));
    }

    #[test]
    fn a_branch_that_nothing_joins_is_not_covered() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let first = graphs.add(graph, Work::Library, vec![]).expect("exists");
        let left = graphs.add(graph, Work::Library, vec![first]).expect("exists");
        assert!(graphs.is_covered_by(graph, &[left]));
        let right = graphs.add(graph, Work::Empty, vec![first]).expect("exists");
        assert!(!graphs.is_covered_by(graph, &[left]) && graphs.is_covered_by(graph, &[left, right]));
        assert!(graphs.dot(graph).expect("exists").contains(&format!("n{first:x} -> n{right:x};")));
    }
}
