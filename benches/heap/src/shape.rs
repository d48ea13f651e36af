//! A synthetic heap with the shape of a Python process: namespaces, instances with dictionaries, lists, chains.

use unhand_heap::{Graph, Node};

/// A heap and what is asked about it. The root is node 0.
pub struct Heap {
    pub graph: Graph,
    pub anchors: Vec<Node>,
    pub targets: Vec<(Node, u64)>,
}

const N_ANCHORS: u32 = 3_000;

/// A small generator of random numbers (xorshift), the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new() -> Random {
        Random(0x9e37_79b9_7f4a_7c15)
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) * u64::from(limit) >> 32) as u32
    }
}

struct Maker {
    random: Random,
    edges: Vec<(Node, Node)>,
    targets: Vec<(Node, u64)>,
    next: Node,
}

impl Heap {
    /// Nodes are numbered as they are made: each thing near what refers to it, as in a process that has just started.
    /// For each four references that make the tree there is one more: to a class, back to where it came from, or to
    /// something made before.
    pub fn new(n_nodes: u32, n_targets: usize) -> Heap {
        let mut maker =
            Maker { random: Random::new(), edges: Vec::new(), targets: Vec::new(), next: N_ANCHORS + 1 };
        maker.edges.extend((1..=N_ANCHORS).map(|anchor| (0, anchor)));
        let per_target = n_nodes / n_targets as u32;
        while maker.next < n_nodes {
            let anchor = 1 + maker.random.below(N_ANCHORS);
            match maker.random.below(100) {
                0 => {
                    let length = 1 + maker.random.below(n_nodes / 20);
                    maker.list(anchor, length, n_nodes);
                }
                1 => {
                    let length = 1 + maker.random.below(n_nodes / 10);
                    maker.chain(anchor, length, n_nodes);
                }
                2..20 => {
                    let length = 1 + maker.random.below(300);
                    maker.list(anchor, length, n_nodes);
                }
                _ => maker.object(anchor, 5, n_nodes),
            }
            // Some of the last objects get a tensor, so that there are as many as asked for when it ends.
            while maker.targets.len() < (maker.next / per_target) as usize && maker.next + 2 <= n_nodes {
                let holder = maker.next - 1 - maker.random.below(maker.next.min(2_000) / 2);
                let tensor = maker.made_by(holder);
                let storage = maker.made_by(tensor);
                let bytes = 512 << maker.random.below(16);
                maker.targets.push((storage, bytes));
            }
        }
        let graph = Graph::from_edges(maker.next, &maker.edges).expect("the edges are between its nodes");
        Heap { graph, anchors: (1..=N_ANCHORS).collect(), targets: maker.targets }
    }

    /// The same heap with its nodes numbered at random, the root excepted: nothing is near anything.
    pub fn shuffled(&self) -> Heap {
        let mut random = Random::new();
        let mut name: Vec<Node> = (0..self.graph.n_nodes()).collect();
        for index in (2..name.len()).rev() {
            name.swap(index, 1 + random.below(index as u32) as usize);
        }
        let named = |node: Node| name[node as usize];
        let edges: Vec<(Node, Node)> =
            self.graph.edges().map(|(from, to)| (named(from), named(to))).collect();
        Heap {
            graph: Graph::from_edges(self.graph.n_nodes(), &edges).expect("the names are those of the nodes"),
            anchors: self.anchors.iter().map(|&node| named(node)).collect(),
            targets: self.targets.iter().map(|&(node, bytes)| (named(node), bytes)).collect(),
        }
    }
}

impl Maker {
    fn made_by(&mut self, from: Node) -> Node {
        let node = self.next;
        self.next += 1;
        self.edges.push((from, node));
        match self.random.below(40) {
            0..4 => self.edges.push((node, 1 + self.random.below(N_ANCHORS))),
            4..7 => self.edges.push((node, from)),
            7..9 => {
                let near = self.next - 1 - self.random.below(self.next.min(50));
                self.edges.push((node, near.max(1)));
            }
            9 => {
                let far = 1 + self.random.below(self.next - 1);
                self.edges.push((node, far));
            }
            _ => {}
        }
        node
    }

    /// An instance, its dictionary, its attributes; some of them instances again.
    fn object(&mut self, from: Node, depth: u32, n_nodes: u32) {
        let instance = self.made_by(from);
        let dictionary = self.made_by(instance);
        for _ in 0..2 + self.random.below(7) {
            if self.next + 2 > n_nodes {
                return;
            }
            if depth > 0 && self.random.below(4) == 0 {
                self.object(dictionary, depth - 1, n_nodes);
            } else {
                self.made_by(dictionary);
            }
        }
    }

    /// A list of small things.
    fn list(&mut self, from: Node, length: u32, n_nodes: u32) {
        let list = self.made_by(from);
        for _ in 0..length {
            if self.next + 4 > n_nodes {
                return;
            }
            let item = self.made_by(list);
            for _ in 0..self.random.below(3) {
                self.made_by(item);
            }
        }
    }

    /// A linked list; each cell has a value.
    fn chain(&mut self, from: Node, length: u32, n_nodes: u32) {
        let mut cell = self.made_by(from);
        for _ in 0..length {
            if self.next + 2 > n_nodes {
                return;
            }
            self.made_by(cell);
            cell = self.made_by(cell);
        }
    }
}
