//! Times dominators and holdings on a synthetic heap, beside petgraph: `heap-bench [NODES [TARGETS]]`.
//!
//! Prints CPU seconds (the best of five) and the memory each question takes beside the graph. The dominators of both
//! must be the same for every node. With `HEAP_BENCH_ALONE=1` petgraph is left out.

mod shape;

use std::hint::black_box;

use petgraph::algo::dominators::simple_fast;
use petgraph::graph::DiGraph;
use shape::Heap;
use unhand_heap::{Dominators, Graph, Question, holdings};

type Failure = Box<dyn std::error::Error>;

/// Time this thread has spent on a processor: what else the machine does counts less than with a clock.
fn cpu_seconds() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split_whitespace().next().ok_or("no CPU time")?.parse()?;
    Ok(nanoseconds / 1e9)
}

/// A line of `/proc/self/status` in MiB.
fn memory_mib(line: &str) -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let found = status.lines().find_map(|text| text.strip_prefix(line)).ok_or("no such line")?;
    let kib: f64 = found.trim_matches([':', ' ', '\t']).trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}

/// Prints the CPU seconds of the best of some runs, and how far the resident memory rose above where it was.
fn measure<T>(name: &str, times: u32, mut run: impl FnMut() -> T) -> Result<(T, f64), Failure> {
    let before_mib = memory_mib("VmRSS")?;
    // Makes the kernel forget the peak.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let mut best = f64::INFINITY;
    let mut result = None;
    for _ in 0..times {
        drop(result.take());
        let start = cpu_seconds()?;
        result = Some(black_box(run()));
        best = best.min(cpu_seconds()? - start);
    }
    let peak_mib = memory_mib("VmHWM")? - before_mib;
    println!("{name:<36} {best:>8.3} CPU-s {peak_mib:>8.0} MiB");
    Ok((result.ok_or("not run")?, best))
}

fn answer(heap: &Heap) -> Result<f64, Failure> {
    let Heap { graph, anchors, targets } = heap;
    let mut weights = vec![0; graph.n_nodes() as usize];
    for &(node, bytes) in targets {
        weights[node as usize] = bytes;
    }
    let (dominators, making) = measure("Dominators::of", 5, || Dominators::of(graph, 0))?;
    let (retained, summing) = measure("Dominators::retained", 5, || dominators.retained(&weights))?;
    println!("{:<36} {:>8.3} CPU-s", "both", making + summing);
    let all_bytes: u64 = targets.iter().map(|target| target.1).sum();
    assert_eq!(retained[0], all_bytes, "the root retains everything");
    measure("Graph::transposed", 5, || graph.transposed())?;
    let question = Question { graph, root: 0, anchors, targets };
    let (answer, _) = measure("holdings", 5, || holdings(&question))?;
    let held: u64 = answer.holdings.iter().map(|holding| holding.bytes).sum();
    assert_eq!(held, all_bytes, "every target is held");
    println!("  {} holdings, {} owners", answer.holdings.len(), answer.retained_by_owner.len());
    Ok(making)
}

/// Last of all: it leaves much small memory behind, which would hide what the others take.
fn compare(graph: &Graph, making: f64) -> Result<(), Failure> {
    let dominators = Dominators::of(graph, 0);
    let other = DiGraph::<(), (), u32>::from_edges(graph.edges());
    let (found, theirs) = measure("petgraph 0.8.3, simple_fast", 1, || simple_fast(&other, 0.into()))?;
    for node in 0..graph.n_nodes() {
        let expected = found.immediate_dominator(node.into()).map(|node| node.index() as u32);
        assert_eq!(dominators.immediate(node), expected, "node {node}");
    }
    println!("  the same dominators, {:.1} times the time of Dominators::of", theirs / making);
    Ok(())
}

/// Runs this program again with an allocator that takes large arrays from the kernel and gives them back: memory can be
/// told from outside then, and each run pays for its pages like the first one.
fn with_fresh_memory() -> Result<(), Failure> {
    let status = std::process::Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(FRESH_MEMORY, "131072")
        .status()?;
    std::process::exit(status.code().unwrap_or(1));
}

const FRESH_MEMORY: &str = "MALLOC_MMAP_THRESHOLD_";

fn main() -> Result<(), Failure> {
    if std::env::var_os(FRESH_MEMORY).is_none() {
        return with_fresh_memory();
    }
    let mut arguments = std::env::args().skip(1);
    let n_nodes = arguments.next().map_or(Ok(2_000_000), |text| text.parse())?;
    let n_targets = arguments.next().map_or(Ok(100_000), |text| text.parse())?;
    let heap = Heap::new(n_nodes, n_targets);
    let n_edges = heap.graph.n_edges();
    println!("{n_nodes} nodes, {n_edges} edges, {} targets, in the order they were made", heap.targets.len());
    let making = answer(&heap)?;
    println!("\nthe same, numbered at random");
    let shuffled = heap.shuffled();
    let making_shuffled = answer(&shuffled)?;
    if std::env::var_os("HEAP_BENCH_ALONE").is_some() {
        return Ok(());
    }
    println!("\nbeside another library, in both orders");
    compare(&heap.graph, making)?;
    compare(&shuffled.graph, making_shuffled)
}
