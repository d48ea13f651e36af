//! Graphs, sets of nodes and ways through them, against lists of edges.

mod support;

use proptest::prelude::*;
use support::{graph_of, graphs, reach_by};
use unhand_heap::{Error, Graph, IMMORTAL, Node, NodeSet, Paths, external_roots, reachable, shortest_path};

const N_NODES: u32 = 12;

fn sorted(mut edges: Vec<(Node, Node)>) -> Vec<(Node, Node)> {
    edges.sort_unstable();
    edges
}

#[test]
fn refuses_arrays_that_are_no_graph() {
    for (offsets, successors, error) in [
        (vec![], vec![], Error::Offsets { index: 0 }),
        (vec![1, 1], vec![0], Error::Offsets { index: 0 }),
        (vec![0, 2, 1], vec![0], Error::Offsets { index: 2 }),
        (vec![0, 1, 1], vec![0, 1], Error::Offsets { index: 2 }),
        (vec![0, 1, 3], vec![0, 1], Error::Offsets { index: 2 }),
        (vec![0, 1, 2], vec![0, 2], Error::NoSuchNode { node: 2, n_nodes: 2 }),
    ] {
        assert_eq!(Graph::from_csr(offsets, successors), Err(error));
    }
    assert_eq!(Graph::from_edges(2, &[(0, 1), (5, 1)]), Err(Error::NoSuchNode { node: 5, n_nodes: 2 }));
    assert_eq!(Graph::from_edges(u32::MAX, &[]), Err(Error::TooLarge { nodes: 4_294_967_295, edges: 0 }));
    let graph = graph_of(3, &[(0, 1)]);
    assert_eq!(graph.with_edges(2, &[]), Err(Error::FewerNodes { asked: 2, n_nodes: 3 }));
    assert_eq!(graph.with_edges(4, &[(4, 0)]), Err(Error::NoSuchNode { node: 4, n_nodes: 4 }));
}

#[test]
fn says_what_is_wrong() {
    let message = |result: Result<Graph, Error>| result.expect_err("it is wrong").to_string();
    assert_eq!(
        message(Graph::from_csr(vec![0, 2, 1], vec![0])),
        "the offsets do not fit the edges: at index `2`"
    );
    assert_eq!(message(Graph::from_edges(2, &[(0, 7)])), "no such node: `7` (the graph has 2)");
}

#[test]
fn a_graph_without_nodes_is_a_graph() {
    let graph = Graph::from_csr(vec![0], vec![]).unwrap();
    assert_eq!((graph.n_nodes(), graph.n_edges(), graph.successors(0)), (0, 0, &[][..]));
    assert_eq!(graph, graph_of(0, &[]));
    assert_eq!((graph.transposed(), graph.in_degrees()), (graph.clone(), vec![]));
    assert!(reachable(&graph, &[3], |_| true).is_empty());
    assert_eq!(shortest_path(&graph, 0, 0), None);
}

#[test]
fn a_way_from_a_node_to_itself_is_that_node() {
    let graph = graph_of(2, &[(0, 1)]);
    assert_eq!(shortest_path(&graph, 1, 1), Some(vec![1]));
    assert_eq!(shortest_path(&graph, 1, 0), None);
    assert_eq!(shortest_path(&graph, 0, 9), None);
    assert_eq!(shortest_path(&graph, 9, 9), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn prop_keeps_every_edge_and_the_order_of_successors(
        edges in graphs(N_NODES, 40),
        more in graphs(N_NODES + 3, 20),
    ) {
        let graph = graph_of(N_NODES, &edges);
        let of = |edges: &[(Node, Node)], node| -> Vec<Node> {
            edges.iter().filter(|edge| edge.0 == node).map(|edge| edge.1).collect()
        };
        for node in 0..N_NODES {
            prop_assert_eq!(graph.successors(node), of(&edges, node));
        }
        prop_assert_eq!(graph.n_edges(), edges.len());
        let larger = graph.with_edges(N_NODES + 3, &more).unwrap();
        prop_assert_eq!(larger, graph_of(N_NODES + 3, &[edges, more].concat()));
    }

    #[test]
    fn prop_turning_round_keeps_every_edge(edges in graphs(N_NODES, 40)) {
        let graph = graph_of(N_NODES, &edges);
        let turned: Vec<_> = edges.iter().map(|&(from, to)| (to, from)).collect();
        let transposed = graph.transposed();
        prop_assert_eq!(transposed.edges().collect::<Vec<_>>(), sorted(turned));
        let in_degrees: Vec<u32> =
            (0..N_NODES).map(|node| u32::try_from(transposed.successors(node).len()).unwrap()).collect();
        prop_assert_eq!(graph.in_degrees(), in_degrees);
    }

    #[test]
    fn prop_cuts_the_edges_into_a_set(
        edges in graphs(N_NODES, 40),
        cut in prop::collection::vec(0..N_NODES, 0..6),
        except_from in 0..N_NODES,
    ) {
        let kept: Vec<_> =
            edges.iter().copied().filter(|&(from, to)| from == except_from || !cut.contains(&to)).collect();
        let cut: NodeSet = cut.into_iter().collect();
        let graph = graph_of(N_NODES, &edges).without_edges_into(&cut, except_from);
        prop_assert_eq!(graph, graph_of(N_NODES, &kept));
    }

    #[test]
    fn prop_reaches_what_a_fixed_point_reaches(
        edges in graphs(N_NODES, 30),
        from in prop::collection::vec(0..N_NODES, 0..3),
        closed in prop::collection::vec(0..N_NODES, 0..6),
    ) {
        let graph = graph_of(N_NODES, &edges);
        let is_open = |node| !closed.contains(&node);
        let expected = reach_by(N_NODES, &from, &edges, |tail, _| is_open(tail) || from.contains(&tail));
        let found = reachable(&graph, &from, is_open);
        prop_assert_eq!((0..N_NODES).map(|node| found.contains(node)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn prop_ways_are_ways_and_no_others_are_shorter(edges in graphs(N_NODES, 24), from in 0..N_NODES) {
        let graph = graph_of(N_NODES, &edges);
        // Bellman and Ford: the least number of edges to each node.
        let mut distance = [usize::MAX; N_NODES as usize];
        distance[from as usize] = 0;
        for _ in 0..N_NODES {
            for &(tail, head) in &edges {
                distance[head as usize] = distance[head as usize].min(distance[tail as usize].saturating_add(1));
            }
        }
        let paths = Paths::from(&graph, from);
        for (to, distance) in (0..).zip(distance) {
            let path = paths.to(to);
            prop_assert_eq!(&path, &shortest_path(&graph, from, to));
            prop_assert_eq!(path.as_ref().map_or(usize::MAX, |path| path.len() - 1), distance);
            if let Some(path) = path {
                prop_assert_eq!((path[0], path[path.len() - 1]), (from, to));
                prop_assert!(path.windows(2).all(|pair| edges.contains(&(pair[0], pair[1]))));
            }
        }
    }

    /// A heap whose references from outside are known: the counts are made from them, and must give them back.
    #[test]
    fn prop_finds_the_references_from_outside(
        edges in graphs(N_NODES, 24),
        root in 0..N_NODES,
        outside in prop::collection::vec(prop_oneof![3 => Just(0_u32), 1 => 1..4_u32, 1 => Just(IMMORTAL)], 12),
    ) {
        let degree = |node: u32| u32::try_from(edges.iter().filter(|edge| edge.1 == node).count()).unwrap();
        let counts: Vec<u32> = (0..).zip(&outside).map(|(node, &more)| match more {
            IMMORTAL => IMMORTAL,
            more => more + degree(node),
        }).collect();
        let from_root = reach_by(N_NODES, &[root], &edges, |_, _| true);
        let is_outside_root = |node: &u32| !from_root[*node as usize];
        let native: Vec<Node> = (0..N_NODES).filter(is_outside_root).filter(|&node| match outside[node as usize] {
            IMMORTAL => degree(node) == 0,
            more => more > 0,
        }).collect();
        let alive: Vec<Node> = (0..N_NODES).filter(is_outside_root).filter(|&node| outside[node as usize] > 0).collect();
        let alive = reach_by(N_NODES, &alive, &edges, |_, _| true);
        let garbage: NodeSet =
            (0..N_NODES).filter(is_outside_root).filter(|&node| !alive[node as usize]).collect();
        let roots = external_roots(&graph_of(N_NODES, &edges), root, &counts);
        prop_assert_eq!(roots.native, native);
        prop_assert_eq!(roots.garbage, garbage);
    }
}

#[test]
fn a_cycle_that_nobody_refers_to_is_garbage() {
    // 1 and 2 refer to each other; 3 and 4 too, but something has a reference to 3.
    let graph = graph_of(5, &[(1, 2), (2, 1), (3, 4), (4, 3)]);
    let roots = external_roots(&graph, 0, &[1, 1, 1, 2, 1]);
    assert_eq!((roots.native, roots.garbage.iter().collect::<Vec<_>>()), (vec![3], vec![1, 2]));
}

#[test]
fn a_count_that_is_missing_makes_no_garbage() {
    let roots = external_roots(&graph_of(3, &[(1, 2), (2, 1)]), 0, &[]);
    assert!(roots.native.is_empty() && roots.garbage.is_empty());
}
