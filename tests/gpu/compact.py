#!/usr/bin/env python3
"""`unhand.compact()` on a real device: what comes back, how fast, and whether training goes on bit for bit.

usage: compact.py [fragmented|training|streams ...]

Each workload runs in processes of its own, with default settings and with expandable segments, and prints one JSON
line; `"ok": false` says what was wrong. Needs torch and unhand, nothing else. Exits with 1 if anything was wrong.
"""

import json
import os
import random
import subprocess
import sys
import time

MIB = 1 << 20
SETTINGS = ("", "expandable_segments:True")


def fragmented(percent):
    """4,000 blocks of 0.75 to 8.5 MiB and 20,000 small ones, of which 90 or 95 percent are freed again."""
    import torch

    import unhand

    chance = random.Random(0)
    step = 100 // (100 - percent)
    sizes = [chance.choice([3, 7, 11, 17, 33]) * (1 << 18) + chance.randrange(1 << 18) for _ in range(4000)]
    large = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    small = [torch.empty(chance.randrange(1, 200_000), dtype=torch.uint8, device="cuda") for _ in range(20000)]
    full = torch.cuda.memory_reserved()
    kept = large[::step] + small[:: 2 * step]
    del large, small
    for index, tensor in enumerate(kept):
        tensor.copy_(noise(index, tensor.numel()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    live, before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    dry = unhand.compact(dry_run=True)
    started = time.perf_counter()
    answer = unhand.compact()
    seconds = time.perf_counter() - started
    reserved = torch.cuda.memory_reserved()
    wrong = [index for index, tensor in enumerate(kept) if not torch.equal(tensor, noise(index, tensor.numel()))]
    problems = [f"{len(wrong)} tensors changed"] if wrong else []
    if reserved > 1.03 * live + 20 * MIB:
        problems.append(f"reserved {reserved} of {live} live")
    return {
        "full_bytes": full,
        "before_bytes": before,
        "live_bytes": live,
        "reserved_bytes": reserved,
        "ratio_before": round(before / live, 3),
        "ratio_after": round(reserved / live, 4),
        "predicted_bytes": dry.after.reserved_bytes,
        "returned_bytes": answer.returned_bytes,
        "n_moved": answer.n_moved,
        "moved_bytes": answer.moved_bytes,
        "passes": answer.passes,
        "extra_bytes": answer.extra_bytes,
        "seconds": round(seconds, 3),
        "n_other_allocations": answer.n_other_allocations,
        "note": answer.note,
    }, problems


def noise(index, size):
    import torch

    generator = torch.Generator(device="cuda").manual_seed(index)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)


def streams(_):
    """Blocks of three streams, some used on another; work goes on before and after without a pause."""
    import torch

    import unhand

    sides = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    chance = random.Random(1)
    kept, expected = [], []
    for side in sides:
        with torch.cuda.stream(side):
            blocks = [torch.full((chance.randrange(1, 3 * MIB),), 1.0, device="cuda") for _ in range(400)]
            for block in blocks[::10]:
                for _ in range(20):
                    block.mul_(1.5).add_(1)
                block.record_stream(sides[0])
            kept += blocks[::10]
            del blocks, block
    one = 1.0
    for _ in range(20):
        one = one * 1.5 + 1
    expected = torch.tensor(one).item()
    before = torch.cuda.memory_reserved()
    answer = unhand.compact()
    problems = [f"{block[0].item()} in place of {expected}" for block in kept if not bool((block == block[0]).all())]
    problems += [f"{block[0].item()} is not {expected}" for block in kept if abs(block[0].item() / expected - 1) > 1e-5]
    if answer.skipped:
        problems.append(str(answer.skipped))
    return {
        "before_bytes": before,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "live_bytes": torch.cuda.memory_allocated(),
        "n_moved": answer.n_moved,
        "seconds": round(answer.seconds, 3),
    }, problems[:3]


def training(_):
    """The losses of a small GPT with and without compaction, after a fragmented start and between steps."""
    plain, _ = losses(False)
    again, _ = losses(False)
    compacted, answers = losses(True)
    problems = []
    if plain != again:
        problems.append("two runs without compaction differ: nothing can be said")
    elif plain != compacted:
        step = next(i for i, pair in enumerate(zip(plain, compacted)) if pair[0] != pair[1])
        problems.append(f"loss {compacted[step]!r} in place of {plain[step]!r} in step {step}")
    if not any(answer.n_moved for answer in answers):
        problems.append("nothing was moved")
    return {
        "steps": len(plain),
        "first_loss": plain[0],
        "last_loss": plain[-1],
        "identical": plain == compacted,
        "n_moved": [answer.n_moved for answer in answers],
        "reserved_before_bytes": [answer.before.reserved_bytes for answer in answers],
        "reserved_after_bytes": [answer.after.reserved_bytes for answer in answers],
        "live_bytes": [answer.after.allocated_bytes for answer in answers],
        "seconds": [round(answer.seconds, 3) for answer in answers],
        "skipped": sorted({skipped.reason for answer in answers for skipped in answer.skipped}),
    }, problems


def losses(is_compacted, n_steps=12):
    import torch
    from torch import nn

    import unhand

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    width, heads, length, words = 512, 8, 128, 4096

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            shape = (batch, length, heads, width // heads)
            q, k, v = (part.view(shape).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1))
            scores = q @ k.transpose(-2, -1) / (width // heads) ** 0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.last = nn.LayerNorm(width)

        def forward(self, tokens):
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.last(x) @ self.words.weight.t()  # Tied weights.

    # Blocks between the parameters, so that the model lies scattered.
    chance = random.Random(3)
    litter = []
    model = Model()
    for module in model.modules():
        litter += [torch.empty(chance.randrange(1, 4 * MIB), dtype=torch.uint8, device="cuda") for _ in range(12)]
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().cuda()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, words, (8, length + 1), generator=generator) for _ in range(n_steps)]
    del litter
    found, answers = [], []
    for step, batch in enumerate(batches):
        if is_compacted and step in (0, 1, 4, 8):
            answers.append(unhand.compact(extra="256MiB"))
        batch = batch.cuda()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if is_compacted and step == 6:
            # With the whole graph alive: what autograd saved moves too.
            answers.append(unhand.compact(extra="256MiB"))
        optimizer.zero_grad()
        loss.backward()
        if is_compacted and step == 7:
            answers.append(unhand.compact(extra="256MiB"))
        optimizer.step()
        found.append(loss.item())
    return found, answers


RUNS = [(fragmented, 90), (fragmented, 95), (streams, None), (training, None)]


def run(name, argument):
    """One workload in this process, one JSON line."""
    import torch

    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    line = {"workload": name, "argument": argument, "settings": settings or "default", "torch": torch.__version__}
    figures, problems = globals()[name](argument)
    print(json.dumps({**line, "ok": not problems, "problems": problems, **figures}), flush=True)
    return 1 if problems else 0


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        return run(sys.argv[2], json.loads(sys.argv[3]))
    failed = 0
    for workload, argument in RUNS:
        if sys.argv[1:] and workload.__name__ not in sys.argv[1:]:
            continue
        for settings in SETTINGS:
            environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=settings, CUBLAS_WORKSPACE_CONFIG=":4096:8")
            if not settings:
                del environment["PYTORCH_CUDA_ALLOC_CONF"]
            command = [sys.executable, os.path.abspath(__file__), "--one", workload.__name__, json.dumps(argument)]
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
