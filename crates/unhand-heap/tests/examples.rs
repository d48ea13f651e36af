//! Small heaps that a person can draw: the cases that matter, and the rules that large ones show.

mod support;

use support::graph_of;
use unhand_heap::{Answer, Holding, MAX_PARTS, Node, Owner, Part, Question, holdings};

/// The answer for a heap with root 0; the anchors are what the root refers to below node `first_object`.
fn ask(first_object: Node, edges: &[(Node, Node)], targets: &[(Node, u64)]) -> Answer {
    let largest = edges.iter().map(|&(from, to)| from.max(to)).max().unwrap_or(0);
    let anchors: Vec<Node> = (1..first_object).collect();
    let graph = graph_of(largest + 1, edges);
    holdings(&Question { graph: &graph, root: 0, anchors: &anchors, targets })
}

fn owner(anchor: Node, child: Node) -> Owner {
    Owner { anchor, child }
}

fn owners(answer: &Answer) -> Vec<(&[Owner], u64)> {
    answer.holdings.iter().map(|holding| (&holding.owners[..], holding.bytes)).collect()
}

/// The parts as `(node, parent, bytes)`.
fn parts(holding: &Holding) -> Vec<(Node, Option<u32>, u64)> {
    holding.parts.iter().map(|&Part { node, parent, bytes, .. }| (node, parent, bytes)).collect()
}

#[test]
fn no_targets_are_held_by_nobody() {
    assert_eq!(ask(2, &[(0, 1), (1, 2)], &[]), Answer::default());
}

#[test]
fn a_target_right_below_an_anchor_is_its_own_owner() {
    let answer = ask(2, &[(0, 1), (1, 2)], &[(2, 7)]);
    assert_eq!(owners(&answer), [(&[owner(1, 2)][..], 7)]);
    assert_eq!(answer.holdings[0].parts, []);
    assert_eq!(answer.retained_by_owner, [(owner(1, 2), 7)]);
}

#[test]
fn an_owner_can_be_a_target_and_hold_others() {
    // 2 is a target that refers to the list 3, which holds two more.
    let answer = ask(2, &[(0, 1), (1, 2), (2, 3), (3, 4), (3, 5)], &[(2, 1), (4, 10), (5, 20)]);
    assert_eq!(owners(&answer), [(&[owner(1, 2)][..], 31)]);
    assert_eq!(parts(&answer.holdings[0]), [(3, None, 30)]);
}

#[test]
fn two_owners_of_one_list_hold_it_together() {
    let answer = ask(3, &[(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5)], &[(4, 10), (5, 20)]);
    assert_eq!(owners(&answer), [(&[owner(1, 3), owner(2, 3)][..], 30)]);
    assert_eq!(parts(&answer.holdings[0]), [(3, None, 30)]);
    assert_eq!(answer.retained_by_owner, [(owner(1, 3), 0), (owner(2, 3), 0)]);
}

#[test]
fn owners_that_refer_to_each_other_hold_the_same() {
    // 2 and 3 refer to each other; each holds a target of its own besides.
    let answer = ask(2, &[(0, 1), (1, 2), (1, 3), (2, 3), (3, 2), (2, 4), (3, 5)], &[(4, 10), (5, 20)]);
    assert_eq!(owners(&answer), [(&[owner(1, 2), owner(1, 3)][..], 30)]);
    assert_eq!(parts(&answer.holdings[0]), [(3, None, 20), (2, None, 10)]);
}

#[test]
fn functions_do_not_hold_what_their_module_holds() {
    // The function 3 of namespace 2 refers to namespace 1, which has the model 4.
    let answer = ask(3, &[(0, 1), (0, 2), (2, 3), (3, 1), (1, 4), (4, 5)], &[(5, 9)]);
    assert_eq!(answer.retained_by_owner, [(owner(1, 4), 9)]);
}

#[test]
fn what_the_root_refers_to_is_an_owner_unless_it_is_an_anchor() {
    let answer = ask(2, &[(0, 1), (0, 2), (1, 3), (2, 4), (3, 5)], &[(4, 1), (5, 2)]);
    assert_eq!(answer.retained_by_owner, [(owner(1, 3), 2), (owner(0, 2), 1)]);
}

#[test]
fn two_names_for_one_thing_are_one_owner() {
    let answer = ask(2, &[(0, 1), (1, 2), (1, 2), (2, 3)], &[(3, 4)]);
    assert_eq!(answer.retained_by_owner, [(owner(1, 2), 4)]);
}

#[test]
fn a_target_counts_once_with_its_first_weight() {
    let answer = ask(2, &[(0, 1), (1, 2), (2, 3)], &[(3, 4), (3, 100)]);
    assert_eq!((answer.holdings[0].bytes, &answer.holdings[0].targets[..]), (4, &[3][..]));
}

#[test]
fn targets_that_nobody_holds_are_listed() {
    // 3 and 4 refer to each other only; 9 is not in the graph; nobody holds the root.
    let answer = ask(2, &[(0, 1), (1, 2), (3, 4), (4, 3)], &[(9, 1), (4, 1), (0, 1), (2, 1), (4, 1)]);
    assert_eq!(answer.unheld, [0, 4, 9]);
    assert_eq!(answer.holdings.len(), 1);
}

#[test]
fn an_anchor_that_is_a_target_is_held_by_the_root() {
    let answer = ask(2, &[(0, 1), (1, 2), (2, 3)], &[(1, 50), (3, 4)]);
    assert_eq!(owners(&answer), [(&[owner(0, 1)][..], 50), (&[owner(1, 2)][..], 4)]);
}

#[test]
fn sums_of_bytes_do_not_overflow() {
    let answer = ask(2, &[(0, 1), (1, 2), (2, 3), (2, 4)], &[(3, u64::MAX), (4, 1)]);
    assert_eq!(answer.retained_by_owner, [(owner(1, 2), u64::MAX)]);
    assert_eq!(parts(&answer.holdings[0]), [(2, None, u64::MAX)]);
}

#[test]
fn a_chain_is_its_last_object_before_the_storage() {
    // An optimizer 2, its state 3, the dictionary 4, the tensor 5, the storage 6.
    let answer = ask(2, &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)], &[(6, 8)]);
    assert_eq!(parts(&answer.holdings[0]), [(5, None, 8)]);
}

#[test]
fn parts_begin_where_the_targets_part() {
    // The model 2 has a dictionary 3 with the layers 4 and 5; 5 has two tensors.
    let edges = [(0, 1), (1, 2), (2, 3), (3, 4), (3, 5), (4, 6), (5, 7), (5, 8), (6, 9), (7, 10), (8, 11)];
    let answer = ask(2, &edges, &[(9, 30), (10, 25), (11, 15)]);
    let expected = [(3, None, 70), (5, Some(0), 40), (7, Some(1), 25), (8, Some(1), 15), (6, Some(0), 30)];
    assert_eq!(parts(&answer.holdings[0]), expected);
}

/// A list of tensors with a storage each: node 2 is the list, then tensor and storage by turns.
fn list_of(bytes: &[u64]) -> Holding {
    let mut edges = vec![(0, 1), (1, 2)];
    let mut targets = Vec::new();
    for (tensor, &bytes) in (3..).step_by(2).zip(bytes) {
        edges.extend([(2, tensor), (tensor, tensor + 1)]);
        targets.push((tensor + 1, bytes));
    }
    ask(2, &edges, &targets).holdings.swap_remove(0)
}

#[test]
fn of_many_small_parts_the_eight_largest_are_shown() {
    let bytes: Vec<u64> = (0..500).map(|index| 1000 + index % 100).collect();
    let holding = list_of(&bytes);
    // Index 99, 199, … have the most; of equal ones, the smaller node first.
    let largest = [99, 199, 299, 399, 499, 98, 198, 298];
    let shown = largest.map(|index: u32| (3 + 2 * index, Some(0), bytes[index as usize]));
    assert_eq!(parts(&holding), [&[(2, None, bytes.iter().sum())][..], &shown].concat());
    assert_eq!(holding.parts[0].n_targets, 500);
}

#[test]
fn parts_of_two_per_cent_are_shown_however_many() {
    // 2 % of 5000 is 100: twelve have that, the others 99 or less, to make up the sum.
    let mut bytes = vec![100; 12];
    bytes.extend([99; 38]);
    bytes.push(5000 - 1200 - 99 * 38);
    assert_eq!(bytes.iter().sum::<u64>(), 5000);
    assert_eq!(list_of(&bytes).parts.len(), 1 + 12);
    // One byte more in all, and 100 is less than 2 %.
    *bytes.last_mut().unwrap() += 1;
    assert_eq!(list_of(&bytes).parts.len(), 1 + 8);
}

#[test]
fn no_more_than_twenty_four_parts_and_the_largest_of_all() {
    // Twenty lists of two; each list is larger than any tensor.
    let mut edges = vec![(0, 1), (1, 2)];
    let mut targets = Vec::new();
    for list in 0..20 {
        let first = 3 + 5 * list;
        edges.extend([
            (2, first),
            (first, first + 1),
            (first, first + 2),
            (first + 1, first + 3),
            (first + 2, first + 4),
        ]);
        targets.extend([(first + 3, 100 - u64::from(list)), (first + 4, 50)]);
    }
    let holding = ask(2, &edges, &targets).holdings.swap_remove(0);
    assert_eq!(holding.parts.len(), MAX_PARTS);
    // The whole, the twenty lists, and the first tensors of the three largest lists.
    let lists: Vec<Node> =
        holding.parts.iter().filter(|part| part.parent == Some(0)).map(|part| part.node).collect();
    assert_eq!(lists, (0..20).map(|list| 3 + 5 * list).collect::<Vec<_>>());
    let first = &parts(&holding)[..7];
    let expected = [
        (2, None, targets.iter().map(|target| target.1).sum()),
        (3, Some(0), 150),
        (4, Some(1), 100),
        (8, Some(0), 149),
        (9, Some(3), 99),
        (13, Some(0), 148),
        (14, Some(5), 98),
    ];
    assert_eq!(first, expected);
}

#[test]
fn no_more_than_four_levels() {
    // Each object has a storage and the next object.
    let mut edges = vec![(0, 1), (1, 2)];
    let mut targets = Vec::new();
    for object in (2..30).step_by(2) {
        edges.extend([(object, object + 1), (object, object + 2)]);
        targets.push((object + 1, 10));
    }
    let holding = ask(2, &edges, &targets).holdings.swap_remove(0);
    let nodes: Vec<_> = holding.parts.iter().map(|part| (part.node, part.parent)).collect();
    assert_eq!(nodes, [(2, None), (4, Some(0)), (6, Some(1)), (8, Some(2))]);
}

#[test]
fn a_holding_lists_sixty_four_owners_and_says_when_there_are_more() {
    for (n_owners, has_more) in [(64, false), (65, true)] {
        let mut edges = vec![(0, 1)];
        for child in 2..2 + n_owners {
            edges.extend([(1, child), (child, 100)]);
        }
        let answer = ask(2, &edges, &[(100, 5)]);
        let [holding] = &answer.holdings[..] else { panic!("one set of owners") };
        assert_eq!(holding.owners, (2..66).map(|child| owner(1, child)).collect::<Vec<_>>());
        assert_eq!(holding.more_owners, has_more);
        assert_eq!(answer.retained_by_owner.len(), n_owners as usize);
    }
}
