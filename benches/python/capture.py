"""What a look at the heap costs without any tensor: `python3 capture.py [OBJECTS]`, in CPU seconds, best of five.

`Heap()` takes the graph, `graph()` adds the root, the modules and what native code holds, `retained()` makes the
dominators and sums over them. One object in forty is a target. Once each object refers to the one before it, once to any
before it, with the list of them shuffled.
"""

import gc
import random
import sys
import time

from unhand import _native

N_RUNS = 5


class Item:
    """One of many: an instance with a list, a dictionary and a tuple."""

    def __init__(self, number, other):
        self.name = str(number)
        self.values = [number, other]
        self.extra = {"pair": (self.values, other), "number": number}


def make_crowd(n_objects, is_random):
    """About so many objects that the collector tracks. Each refers to the one before, or to any before."""
    draw = random.Random(1)
    crowd = []
    for number in range(n_objects // 4):
        other = crowd[draw.randrange(number) if is_random else -1] if number else None
        crowd.append(Item(number, other))
    if is_random:
        draw.shuffle(crowd)
    return crowd


def measure(crowd):
    """One round: (nodes, edges, seconds by step)."""
    # No closure may have the heap, not even that of a comprehension: it would be in the heap, and keep it.
    clock = time.process_time
    times = [clock()]
    heap = _native.Heap()
    times.append(clock())
    targets = [(node, 100) for node in map(heap.node, crowd[::10])]
    anchors = [node for node in map(heap.node, map(vars, sys.modules.values())) if node is not None]
    edges = [(0, node) for node in anchors]
    between = clock()
    graph = heap.graph(0, edges, anchors)
    times.append(clock())
    graph.retained(targets, [0])
    times.append(clock())
    graph.holdings(targets)
    times.append(clock())
    seconds = [end - start for start, end in zip(times, times[1:])]
    seconds[1] = times[2] - between
    return heap.n_nodes, heap.n_edges, seconds


def main(n_objects, is_random):
    gc.disable()
    crowd = make_crowd(n_objects, is_random)
    runs = [measure(crowd) for _ in range(N_RUNS)]
    n_nodes, n_edges, _ = runs[0]
    best = [min(seconds) for seconds in zip(*(run[2] for run in runs))]
    whole = min(sum(run[2][:3]) for run in runs)
    names = ("Heap()", "graph()", "retained()", "holdings()")
    words = ", ".join(f"{name} {seconds:.3f}" for name, seconds in zip(names, best))
    print(f"{n_nodes:,} nodes, {n_edges:,} edges{', shuffled' if is_random else ''}: {words}")
    print(f"  Heap() + graph() + retained(), best run: {whole:.3f} CPU-s")


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:] if word.isdigit()] or [1_000_000, 2_000_000]
    for size in sizes:
        for is_random in (False, True):
            main(size, is_random)
