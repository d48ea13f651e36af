"""Peak by stack with Python's own means, for comparison: `python3 compare.py FILE pickle|pickle-no-gc|viewer`.

`pickle` loads the file with `pickle.load` and groups the blocks at the peak by their list of frames; `pickle-no-gc`
does so with the cyclic collector off. `viewer` makes the page of `torch.cuda._memory_viz`: torch has to be installed.
"""

import gc
import pickle
import resource
import sys


def peak_by_stack(trace):
    now, peak, peak_at, sizes = 0, 0, -1, {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_requested":
            now -= sizes.pop(event["addr"], 0)
        if now > peak:
            peak, peak_at = now, index
    live = {}
    for event in trace[: peak_at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    by_stack = {}
    for event in live.values():
        key = tuple((f["name"], f["filename"], f["line"]) for f in event.get("frames", ()))
        by_stack[key] = by_stack.get(key, 0) + event["size"]
    return peak, by_stack


def main(path, how):
    if how == "pickle-no-gc":
        gc.disable()
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    if how == "viewer":
        from torch.cuda import _memory_viz

        print("characters of HTML", len(_memory_viz.trace_plot(snapshot)))
    else:
        peak, by_stack = peak_by_stack(snapshot["device_traces"][0])
        print(f"peak {peak / 2**30:.3f} GiB in {len(by_stack)} stacks")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{how}: {usage.ru_utime + usage.ru_stime:.2f} CPU-s, peak RSS {usage.ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
