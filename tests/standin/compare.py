#!/usr/bin/env python3
"""Compare two recordings event by event: `compare.py EXPECTED.pickle.xz FOUND.pickle.xz`.

Equal means the same actions with the same sizes in the same order, and the same peaks. Addresses may differ: where
the driver puts memory is not for PyTorch to say. Exits with 1 at the first difference, and shows it.
"""

import collections
import json
import lzma
import pickle
import sys

def load(path):
    with lzma.open(path) as file:
        events = pickle.load(file)["device_traces"][0]
    with open(path.replace(".pickle.xz", ".json")) as file:
        figures = json.load(file)["stats"]
    return events, {name: figures[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}

def main():
    (expected, expected_peaks), (found, found_peaks) = load(sys.argv[1]), load(sys.argv[2])
    left, right = ([(event["action"], event["size"]) for event in events] for events in (expected, found))
    name = sys.argv[2].rsplit("/", 1)[-1].removesuffix(".pickle.xz")
    if left != right:
        first = next((i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), min(len(left), len(right)))
        print(f"{name}: {len(right)} events instead of {len(left)}, the first that differs is number {first}")
        print(f"  expected {left[first:first + 5]}\n  found    {right[first:first + 5]}")
        actions = [dict(collections.Counter(action for action, _ in side)) for side in (left, right)]
        print(f"  expected {actions[0]}\n  found    {actions[1]}")
    if expected_peaks != found_peaks:
        print(f"{name}: peaks {found_peaks} instead of {expected_peaks}")
    if left == right and expected_peaks == found_peaks:
        print(f"{name}: {len(left)} events equal, peak reserved {found_peaks['reserved'] >> 20} MiB")
        return
    sys.exit(1)

if __name__ == "__main__":
    main()
