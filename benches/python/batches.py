"""Batch sizes that fit, with unhand, toma, torch-max-mem and accelerate: `python3 batches.py [TOOL]`.

Each tool gets the same function in a process of its own, in one run of this program: what a call costs when everything
fits, what of a failed attempt is alive when the next begins, how often it tries, what it ends with, whether it takes more
when there is more, and which errors it knows. For any GPU, or the stand-in (docs/concepts/stand-in.md). A line of JSON each.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
import weakref

MIB = 1 << 20
ROW_BYTES = 4 * MIB
START = 1024
N_CALLS = 60


def unhand_adaptive(function):
    import unhand

    return unhand.adaptive(function, start=START)


def unhand_batches(function):
    import torch

    import unhand

    rows, name = torch.empty(START), object()

    def call():
        # One piece, as the others do.
        return next(unhand.batches(rows, START, remember=name).map(lambda part: function(len(part))))

    return call


def toma(function):
    from toma import toma

    return toma.batch(function, initial_batchsize=START)


def torch_max_mem(function):
    from torch_max_mem import maximize_memory_utilization

    @maximize_memory_utilization()
    def call(batch_size=START):
        return function(batch_size)

    return call


def accelerate(function):
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=START)
    def call(batch_size):
        return function(batch_size)

    return call


TOOLS = {
    "plain call": lambda function: lambda: function(START),
    "unhand.adaptive": unhand_adaptive,
    "unhand.batches": unhand_batches,
    "toma": toma,
    "torch-max-mem": torch_max_mem,
    "accelerate": accelerate,
}


def microseconds_per_call(wrapped):
    """Of a function that does nothing: CPU time, the median of three rounds."""
    start = time.process_time()
    wrapped()
    once = time.process_time() - start
    n_calls = 2000 if once < 0.002 else 15
    rounds = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(n_calls):
            wrapped()
        rounds.append((time.process_time() - start) / n_calls * 1e6)
    return round(statistics.median(rounds), 1)


class Layers:
    """Takes its memory in five steps, so that a failed attempt holds some when it fails; remembers what it saw."""

    def __init__(self, with_cycle):
        self.with_cycle = with_cycle
        self.tried, self.alive_bytes, self._watches = [], [], []

    def __call__(self, n):
        import torch

        # Of failed attempts, or of one before that went well: nothing should be.
        self.alive_bytes.append(sum(n_bytes for watch, n_bytes in self._watches if watch() is not None))
        self.tried.append(n)
        kept = []
        if self.with_cycle:
            # What modules with hooks and closures come to.
            kept.append(kept)
        for _ in range(5):
            activation = torch.empty(n * ROW_BYTES // 5, dtype=torch.uint8, device="cuda")
            self._watches.append((weakref.ref(activation), n * ROW_BYTES // 5))
            kept.append(activation)
        del kept[:]
        return n


def limit(n_rows):
    """Let this process have memory for so many rows."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # And a little beside for what the allocator rounds up.
    torch.cuda.set_per_process_memory_fraction((n_rows * ROW_BYTES + 64 * MIB) / total)


def errors():
    """Messages of libraries on a full device, as (name, exception)."""
    import torch

    texts = {
        "CUDA out of memory": "CUDA out of memory. Tried to allocate 2.00 MiB",
        "CUDA error": "CUDA error: out of memory",
        "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
        "NCCL": "NCCL error, unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "MPS": "MPS backend out of memory (MPS allocated: 8.87 GB)",
        "host": "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        "MIG": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug',
    }
    yield "torch.OutOfMemoryError", torch.cuda.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 MiB")
    yield "MemoryError", MemoryError()
    for name, text in texts.items():
        yield name, RuntimeError(text)
    wrapped = ValueError("step failed")
    wrapped.__cause__ = torch.cuda.OutOfMemoryError("CUDA out of memory.")
    yield "raised from", wrapped


def known_errors(tool):
    known = []
    for name, error in errors():
        tried = []

        def fail_once(n, error=error, tried=tried):
            tried.append(n)
            if len(tried) == 1:
                raise error
            return n

        try:
            TOOLS[tool](fail_once)()
            known.append(name)
        except Exception:
            continue
    return known


def measure(tool):
    import torch

    torch.zeros(1, device="cuda")
    answer = {"tool": tool, "us_per_call": microseconds_per_call(TOOLS[tool](lambda n: n))}
    if tool == "plain call":
        return answer
    for name, with_cycle in (("retry", False), ("retry with cycles", True)):
        limit(300)
        layers = Layers(with_cycle)
        wrapped = TOOLS[tool](layers)
        gc.disable()
        start = time.process_time()
        wrapped()
        seconds = time.process_time() - start
        gc.enable()
        answer[name] = {
            "tried": list(layers.tried),
            "alive_mib_at_retries": [n_bytes // MIB for n_bytes in layers.alive_bytes[1:]],
            "cpu_ms": round(seconds * 1e3, 1),
        }
        if with_cycle:
            continue
        for _ in range(N_CALLS):
            wrapped()
        answer[name]["size_after_60_calls"] = layers.tried[-1]
        limit(2000)
        for _ in range(N_CALLS):
            wrapped()
        answer[name]["size_when_there_is_more"] = max(layers.tried[-N_CALLS:])
        limit(100)
        n_before = len(layers.tried)
        try:
            for _ in range(N_CALLS):
                wrapped()
            answer[name]["size_when_there_is_less"] = layers.tried[-1]
            answer[name]["tries_then"] = len(layers.tried) - n_before
        except torch.cuda.OutOfMemoryError:
            answer[name]["size_when_there_is_less"] = None
    answer["errors_known"] = known_errors(tool)
    answer["of_errors"] = len(list(errors()))
    return answer


def main(only):
    for tool in [only] if only else TOOLS:
        command = [sys.executable, __file__, "--measure", tool]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(done.stdout.splitlines()[-1] if done.returncode == 0 and done.stdout else f"{tool}: failed", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1] if sys.argv[1:] else None)
