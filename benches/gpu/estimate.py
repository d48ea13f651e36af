#!/usr/bin/env python3
"""What training and inference steps need at their peak: the same file on a GPU and on the stand-in, to compare the two.

    python3 benches/gpu/estimate.py --out gpu.jsonl                            on a GPU
    unhand stand-in -- python3 benches/gpu/estimate.py --out stand-in.jsonl    without one
    python3 benches/gpu/estimate.py --compare gpu.jsonl stand-in.jsonl         a table

Each row is a process of its own with the default allocator settings. Needs PyTorch; rows that need `transformers` or a C
compiler say so where there is none. `-k WORD` chooses by name.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

TIMEOUT_S = 900
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
STEPS = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the lines here as well")
    parser.add_argument("-k", metavar="WORD", default="", help="only rows with this in their name")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="a table of two files: device, estimate")
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
    elif options.one:
        print(json.dumps(measured(options.one)))
    else:
        from estimate_rows import ROWS

        names = [name for name in ROWS if options.k in name]
        lines = []
        for name in names:
            lines.append(json.dumps(in_a_process(name)))
            print(lines[-1], flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def in_a_process(name):
    """The row, or why there is none."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Compiled kernels of an earlier run would spare this one its autotuning.
        environment.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
        command = [sys.executable, __file__, "--one", name]
        try:
            outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"row": name, "error": f"none after {TIMEOUT_S} s"}
    if outcome.returncode != 0:
        said = [line for line in outcome.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception|NotInstalled)\b", line)]
        return {"row": name, "error": (said or [f"exit code {outcome.returncode}"])[-1][:300]}
    row = json.loads(outcome.stdout.strip().splitlines()[-1])
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def measured(name):
    """Run one row in this process."""
    import torch
    from estimate_rows import ROWS

    torch.manual_seed(0)
    ROWS[name](STEPS)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "row": name,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peak_requested_bytes": stats["requested_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "n_allocations": stats["allocation.all.allocated"],
        # What the driver gave out beside the allocator: context, kernels, libraries. Other processes would be in it.
        "outside_bytes": total - free - stats["reserved_bytes.all.current"],
        "host_peak_bytes": host_peak_bytes(),
    }


def host_peak_bytes():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(device, estimate):
    """Print a Markdown table: what a device needed, and by how much the estimate is off."""
    rows = [{row["row"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
            for path in (device, estimate)]
    print("| step | peak allocated | estimate | peak reserved | estimate | outside the allocator | estimate |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, real in rows[0].items():
        guess = rows[1].get(name, {"error": "not run"})
        if "error" in real or "error" in guess:
            print(f"| {name} | {real.get('error', '')} | {guess.get('error', '')} | | | | |")
            continue
        cells = [f"{real[key] / 2**20:,.0f} MiB | {off(guess[key], real[key])}"
                 for key in ("peak_allocated_bytes", "peak_reserved_bytes", "outside_bytes")]
        print(f"| {name} | {' | '.join(cells)} |")


def off(guess, real):
    return "equal" if guess == real else f"{(guess - real) / real:+.2%}"


if __name__ == "__main__":
    main()
