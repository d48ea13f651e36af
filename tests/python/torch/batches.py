"""Pieces that fit, on the real PyTorch: gradients that are exact, memory that shrinks and grows, copies ahead of time.

Kernels of the stand-in compute little, so gradients are compared in host memory, where being out of memory is played.
"""

# stand-in: UNHAND_STANDIN_MEMORY=4GiB

import collections
import gc
import os
import random
import sys
import types
import weakref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import numpy
import torch
from bench import main, raises
from hypothesis import HealthCheck, given, settings, strategies
from torch import nn

import unhand
from unhand import _accumulate, _oom, _fitting

MIB = 1 << 20
TOTAL_BYTES = torch.cuda.get_device_properties(0).total_memory
# What these tests may have: on a larger device as much as on the one above, less its context.
WHOLE = 1.0 if TOTAL_BYTES <= 4096 * MIB else 3570 * MIB / TOTAL_BYTES


def prop(**drawn):
    """A property over drawn values."""

    def decorate(check):
        return settings(max_examples=12, deadline=None, database=None, derandomize=True,
                        suppress_health_check=list(HealthCheck))(given(**drawn)(check))

    return decorate


def full():
    return torch.OutOfMemoryError("CUDA out of memory. Played.") if hasattr(torch, "OutOfMemoryError") else MemoryError()


class Narrow(torch.autograd.Function):
    """Lets so many rows through, forward and backward, and is out of memory with more."""

    @staticmethod
    def forward(ctx, x, forward_room, backward_room):
        if len(x) > forward_room:
            raise full()
        ctx.room = backward_room
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if len(grad) > ctx.room:
            raise full()
        return grad, None, None


class Model(nn.Module):
    """Layers with narrow places between them: what is behind one has its gradient when it fails."""

    def __init__(self, widths, rooms, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.dropout = nn.Dropout(dropout)
        self.rooms = rooms
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        for layer, (forward_room, backward_room) in zip(self.layers, self.rooms):
            x = self.dropout(torch.tanh(layer(Narrow.apply(x, forward_room, backward_room))))
        return x


def gradients(model):
    return [None if tensor.grad is None else tensor.grad.clone() for tensor in model.parameters()]


def same(found, expected):
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, expected, strict=True))


@prop(
    n_rows=strategies.integers(1, 60),
    size=strategies.integers(1, 70),
    widths=strategies.lists(strategies.integers(1, 5), min_size=2, max_size=5),
    rooms=strategies.lists(strategies.tuples(strategies.integers(1, 40), strategies.integers(1, 40)), min_size=4, max_size=4),
    reduction=strategies.sampled_from(["mean", "sum", "tokens"]),
    has_before=strategies.booleans(),
    seed=strategies.integers(0, 1000),
)
def check_prop_gradients_are_those_of_the_batch(n_rows, size, widths, rooms, reduction, has_before, seed):
    torch.manual_seed(seed)
    model = Model(widths, [(1000, 1000)] * 4).double()
    x, y = torch.randn(n_rows, widths[0]).double(), torch.randn(n_rows, widths[-1]).double()
    counts = torch.randint(1, 5, (n_rows,))

    def step(part):
        losses = ((model(part["x"]) - part["y"]) ** 2).sum(1)
        if reduction == "tokens":
            return (losses * part["counts"]).sum() / part["counts"].sum()
        return losses.mean() if reduction == "mean" else losses.sum()

    batch = {"x": x, "y": y, "counts": counts}
    if has_before:
        (model(x) ** 3).mean().backward()
    before = [tensor.grad for tensor in model.parameters()]
    kept = gradients(model)
    expected_loss = step(batch)
    expected_loss.backward()
    expected = gradients(model)
    for tensor, grad, old in zip(model.parameters(), before, kept):
        tensor.grad = grad if grad is None else grad.copy_(old)
    model.rooms, model.seen = rooms, []
    options = {"reduction": "sum"} if reduction == "sum" else {"count": lambda part: part["counts"].sum()} if reduction == "tokens" else {}
    loss = unhand.accumulate(step, batch, size, model, remember=False, **options)
    assert torch.allclose(loss, expected_loss.detach()) and not loss.requires_grad
    assert same(gradients(model), expected)
    if has_before:
        assert all(tensor.grad is grad for tensor, grad in zip(model.parameters(), before))
    # Nothing goes back through the first place, since the batch has no gradient.
    places = rooms[: len(widths) - 1]
    smallest = min([forward for forward, _ in places] + [backward for _, backward in places[1:]])
    assert min(model.seen) <= max(smallest, 1) and max(model.seen) <= size


@prop(
    size=strategies.integers(1, 40),
    rooms=strategies.lists(strategies.tuples(strategies.integers(1, 30), strategies.integers(1, 30)), min_size=3, max_size=3),
    seed=strategies.integers(0, 1000),
)
def check_prop_dropout_is_that_of_the_final_parts(size, rooms, seed):
    """A run that failed on the way is the same, bit for bit, as one that had the final parts from the beginning."""
    torch.manual_seed(seed)
    model = Model([3, 4, 4, 2], rooms, dropout=0.5).double()
    x = torch.randn(40, 3).double()
    done = []

    def step(part):
        loss = model(part).square().mean()
        done.append((part.storage_offset() // 3, len(part)))
        return loss

    torch.manual_seed(seed + 1)
    unhand.accumulate(step, x, size, model, remember=False)
    found, state = gradients(model), torch.get_rng_state()
    # The last try of each first row.
    begins = {}
    for first, n in done:
        begins[first] = n
    parts, at = [], 0
    while at < 40:
        parts.append((at, begins[at]))
        at += begins[at]
    model.rooms = [(1000, 1000)] * 3
    model.zero_grad()
    torch.manual_seed(seed + 1)
    for first, n in parts:
        (step(x[first : first + n]) * (n / 40)).backward()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(model)))
    assert torch.equal(state, torch.get_rng_state())


def check_gradients_come_back_when_nothing_fits():
    model = Model([2, 3, 2], [(1000, 1000), (1000, 1000)])
    (model(torch.randn(4, 2)) ** 2).mean().backward()
    model.rooms[1] = (1000, 0)
    before = [tensor.grad for tensor in model.parameters()]
    kept = gradients(model)
    words = raises(Exception, lambda: unhand.accumulate(lambda x: model(x).mean(), torch.randn(8, 2), 8, model, remember=False))
    assert "Played" in words
    assert all(tensor.grad is grad for tensor, grad in zip(model.parameters(), before)) and same(gradients(model), kept)
    model.rooms[1] = (1000, 1000)
    for error in (ValueError("mine"), KeyboardInterrupt()):

        def fail(part):
            model(part).mean().backward()
            raise error

        raises(type(error), lambda: unhand.accumulate(fail, torch.randn(8, 2), 8, model))
        assert all(tensor.grad is grad for tensor, grad in zip(model.parameters(), before)) and same(gradients(model), kept)


def check_everything_with_a_gradient_is_named():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.randn(4, 2)
    raises(unhand.Error, lambda: unhand.accumulate(lambda x: other(model(x)).mean(), x, 2, model), "shape (2, 2)")
    assert model.weight.grad is None and other.weight.grad is None
    # An optimizer is known by its groups; a real one would bring in the compiler.
    both = [model, types.SimpleNamespace(param_groups=[{"params": list(other.parameters())}])]
    unhand.accumulate(lambda x: other(model(x)).mean(), x, 2, both)
    assert model.weight.grad is not None and other.bias.grad is not None
    raises(unhand.Error, lambda: unhand.accumulate(lambda x: model(x), x, 2, model), "one number")
    raises(unhand.Error, lambda: unhand.accumulate(lambda x: model(x).mean(), x, 2, "model"), "has no gradients")
    raises(ValueError, lambda: unhand.accumulate(lambda x: model(x).mean(), x[:0], 2, model), "without rows")
    raises(TypeError, lambda: unhand.accumulate(lambda x: model(x).mean(), iter(x), 2, model), "cannot be counted")
    raises(ValueError, lambda: unhand.accumulate(lambda x: model(x).mean(), x, 2, model, reduction="max"), '"mean" or "sum"')


def check_only_the_last_part_is_exchanged():
    class Parallel(nn.Linear):
        """Like DistributedDataParallel, as far as it goes."""

        is_exchanging, exchanged = True, 0

        def no_sync(self):
            import contextlib

            @contextlib.contextmanager
            def off():
                self.is_exchanging = False
                yield
                self.is_exchanging = True

            return off()

    model = Parallel(2, 2)
    model.weight.register_hook(lambda grad: setattr(model, "exchanged", model.exchanged + model.is_exchanging))
    unhand.accumulate(lambda x: model(x).mean(), torch.randn(20, 2), 4, model)
    assert model.exchanged == 1
    narrow = [1]

    def step(x):
        # The gradient of the weight is there before the narrow place.
        return Narrow.apply(model(Narrow.apply(x.requires_grad_(), 100, 1 if model.is_exchanging else 100)), 100, 100).mean()

    model.zero_grad()
    words = raises(Exception, lambda: unhand.accumulate(step, torch.randn(20, 2), 4, [model], remember=False))
    assert "Played" in words and narrow and model.weight.grad is None


def check_a_scaler_and_autocast():
    model = nn.Linear(4, 4)
    x = torch.randn(10, 4)
    model(x).square().mean().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = unhand.accumulate(lambda x: model(x).square().mean(), x, 3, model, backward=lambda loss: (loss * 1024).backward())
    assert all(torch.allclose(a / 1024, b, rtol=1e-4) for a, b in zip(gradients(model), expected)) and loss < 1024


# -- on the device


def empty(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


class Work:
    """Takes 8 MiB for each row in two steps, and notes what is alive when an attempt begins."""

    def __init__(self):
        self.began, self.watches, self.tried = [], [], []

    def __call__(self, part):
        self.began.append(torch.cuda.memory_allocated())
        self.tried.append(len(part))
        first = empty(len(part) * 4 * MIB)
        self.watches.append(weakref.ref(first))
        try:
            second = empty(len(part) * 4 * MIB)
        except RuntimeError as error:
            # The frame has the error that has the frame: this does not go by leaving the handler.
            kept = error  # noqa: F841
            raise
        del first, second
        return part.cpu().tolist()


def check_nothing_of_a_failed_attempt_is_alive():
    gc.collect()
    base = torch.cuda.memory_allocated()
    data = torch.arange(2000)
    work = Work()
    gc.disable()
    assert unhand.batches(data, 2000, device="cuda", remember=False).concat(work) == list(range(2000))
    gc.enable()
    failed = [n for n in work.tried if n > 440]
    assert len(failed) >= 3 and work.tried[0] == 2000
    # Only the piece itself.
    assert all(began <= base + max(512, n * 8 + 512) for began, n in zip(work.began, work.tried)), work.began
    assert torch.cuda.memory_allocated() == base

    work = Work()

    @unhand.adaptive(start=2000)
    def call(batch_size):
        return work(torch.empty(batch_size))

    call()
    assert len(work.tried) >= 3 and set(work.began) == {base} and work.tried[-1] > 200


def check_the_cache_goes_back_between_attempts():
    reserved = []

    @unhand.adaptive(start=1024)
    def call(batch_size):
        reserved.append(torch.cuda.memory_reserved())
        kept = [empty(4 * MIB) for _ in range(batch_size)]
        return len(kept)

    assert call() == 512 and reserved[1] <= reserved[0]


def check_a_neighbour_takes_and_gives_memory():
    """Memory comes and goes while it runs; every row is there once, and at the end the pieces are large again."""
    n_failures = 0
    for seed in range(6):
        draw = random.Random(seed)
        ballast = []

        def neighbour():
            if draw.random() < 0.5:
                ballast.clear()
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(draw.uniform(0.1, 1.0) * WHOLE)
                try:
                    ballast.append(empty(draw.randrange(3400) * MIB))
                except torch.OutOfMemoryError:
                    pass

        work = Work()

        def disturbed(part):
            neighbour()
            return work(part)

        pieces = unhand.batches(torch.arange(3000), 256, device="cuda", remember=False)
        assert pieces.concat(disturbed) == list(range(3000)), seed
        n_failures += pieces.n_failures
        ballast.clear()
        torch.cuda.set_per_process_memory_fraction(WHOLE)
        torch.cuda.empty_cache()
    assert n_failures > 10, n_failures
    done = []
    going = unhand.batches(torch.arange(20_000), 128, device="cuda", remember=False)
    ballast = [empty(3000 * MIB)]
    for chunk in going:
        with chunk as part:
            done += work(part)
        if len(done) > 4000:
            ballast.clear()
    assert done == list(range(20_000)) and going.sizes[-2] == 128 and min(going.sizes[:-1]) < 128, going.sizes


def check_gradients_on_a_device_that_fills_up():
    """Of the device the values are not computed; that all parts were there, and that nothing is left, can be seen."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False)).cuda()
    data = torch.empty(600_000, 1024, device="meta")
    seen = []

    def step(part):
        x = torch.empty(len(part), 1024, device="cuda")
        loss = model(x).mean()
        seen.append(len(part))
        return loss

    gc.collect()
    base = torch.cuda.memory_allocated()
    unhand.accumulate(step, data, 600_000, model, remember=False)
    assert len(seen) > 2
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - base <= 2 * 4 * MIB + 4096
    # The loss of a part that failed in its backward pass is counted in `seen` too.
    assert sum(seen) >= 600_000


def check_a_capture_is_refused():
    data = torch.arange(10)
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    model = nn.Linear(1, 1)
    with torch.cuda.graph(graph):
        raises(unhand.CaptureError, lambda: list(unhand.batches(data, 2).map(len)), "captured")
        raises(unhand.CaptureError, unhand.adaptive(lambda batch_size: 1, start=2))
        raises(unhand.CaptureError, lambda: next(unhand.prefetch([data])))

        def loop():
            for chunk in unhand.batches(data, 2):
                with chunk:
                    pass

        raises(unhand.CaptureError, loop)
        x = torch.zeros(4, 1)
        raises(unhand.CaptureError, lambda: unhand.accumulate(lambda x: model(x).mean(), x, 2, model))
    graph.reset()


def check_errors_of_pytorch():
    for call, kind in (
        (lambda: empty(1 << 50), "cuda"),
        (lambda: torch.empty(1 << 50), "host"),
        (lambda: torch.empty(1 << 44, pin_memory=True), "cuda"),
        (lambda: numpy.empty(1 << 50), "host"),
        (lambda: torch.nn.functional.conv2d(empty(16).float().view(1, 1, 4, 4), torch.empty(1)), None),
        (lambda: empty(4) + torch.empty(5), None),
    ):
        try:
            call()
        except Exception as error:
            assert _oom.kind(error) == kind, (kind, _oom.kind(error), error)
        else:
            raise AssertionError(kind)
    ambiguous = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    perhaps = RuntimeError("NCCL error, ncclUnhandledCudaError: Call to CUDA function failed.")
    assert not unhand.is_out_of_memory(ambiguous) and not unhand.is_out_of_memory(perhaps)
    # The driver decides, so all of the device is taken.
    torch.cuda.set_per_process_memory_fraction(1.0)
    ballast = empty(torch.cuda.mem_get_info()[0] - 64 * MIB)
    assert unhand.is_out_of_memory(ambiguous) and unhand.is_out_of_memory(perhaps)
    del ballast
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(WHOLE)


def check_rows_of_tensors():
    pieces = unhand.batches({"x": torch.arange(10).view(5, 2), "n": numpy.arange(5), "k": 3}, 2, device="cuda", remember=False)
    found = list(pieces.map(lambda part: part))
    assert found[0]["x"].is_cuda and found[0]["n"].is_cuda and found[0]["k"] == 3 and found[2]["x"].tolist() == [[8, 9]]
    x = torch.rand(3, 4)
    assert torch.equal(unhand.batches(x, 3, dim=1).concat(lambda part: part * 2, dim=1), x * 2)
    assert torch.equal(unhand.batches(x, 2).concat(lambda part: (part, part.sum(1)))[1], x.sum(1))
    assert unhand.batches(x[:0], 2).concat(lambda part: part.sum(1)).shape == (0,)
    assert numpy.array_equal(unhand.batches(x.numpy(), 2).concat(lambda part: part + 1), x.numpy() + 1)
    assert unhand.batches(x, 2).concat(lambda part: part.cuda(), to="cpu").device.type == "cpu"
    # Pieces are views: nothing is copied.
    assert all(part.data_ptr() >= x.data_ptr() and part._base is x for part in unhand.batches(x, 2).map(lambda part: part))


# -- prefetch


def batches_of(n, rows=4096, columns=16):
    return [{"x": torch.full((rows, columns), float(index)), "index": index} for index in range(n)]


def check_prefetch_gives_the_same_batches():
    source = batches_of(7)
    for depth in (0, 1, 2, 9):
        for pin in (True, False):
            found = list(unhand.prefetch(source, depth=depth, pin=pin))
            assert [batch["index"] for batch in found] == list(range(7))
            assert all(batch["x"].is_cuda and torch.equal(batch["x"].cpu(), plain["x"]) for batch, plain in zip(found, source))
    assert len(unhand.prefetch(source)) == 7
    raises(TypeError, lambda: len(unhand.prefetch(iter(source))))
    # Structures, arrays, and things that are passed on.
    pair = collections.namedtuple("Pair", "x y")
    mixed = pair([torch.ones(2), (numpy.ones(3), "text")], None)
    found = next(unhand.prefetch([mixed]))
    assert type(found) is pair and found.x[0].is_cuda and found.x[1][0].is_cuda and found.x[1][1] == "text" and found.y is None
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    found = next(unhand.prefetch([packed]))
    assert found.data.is_cuda and not found.batch_sizes.is_cuda
    assert next(unhand.prefetch([torch.ones(2)], device="cpu")).device.type == "cpu"


def check_prefetch_memory_is_bounded():
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    size = 4096 * 16 * 4
    for depth, limit_bytes, most in ((0, None, 1), (1, None, 2), (3, None, 4), (9, 2 * size, 3), (9, size - 1, 1), (2, 0, 1)):
        torch.cuda.synchronize()
        pulled = []
        source = (pulled.append(batch["index"]) or batch for batch in batches_of(12))
        ahead = unhand.prefetch(source, depth=depth, limit_bytes=limit_bytes)
        # Not with `enumerate`, which keeps what it gave out last.
        at = -1
        for batch in ahead:
            at += 1
            in_use = torch.cuda.memory_allocated() - base
            assert in_use <= most * size, (depth, limit_bytes, at, in_use / size)
            assert len(pulled) <= at + 1 + depth
            assert ahead.waiting_bytes <= (most - 1) * size
            watch = weakref.ref(batch["x"])
            del batch
            assert watch() is None
        assert len(pulled) == 12 and torch.cuda.memory_allocated() == base


def check_prefetch_memory_is_the_consumer_s():
    """Memory of the side stream could not serve anything else; here nothing is of it."""
    torch.cuda.empty_cache()
    before = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for batch in unhand.prefetch(batches_of(5)):
            pass
        del batch
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] not in before]
    assert segments and {segment["stream"] for segment in segments} == {side.cuda_stream}
    assert not any(block["state"] == "active_pending_free" for segment in segments for block in segment["blocks"])


def check_prefetch_failures_come_in_turn():
    def source():
        yield torch.ones(2)
        yield torch.ones(3)
        raise ValueError("the third is broken")

    found = []

    def loop():
        for batch in unhand.prefetch(source(), depth=5):
            found.append(len(batch))

    raises(ValueError, loop, "the third is broken")
    assert found == [2, 3]
    ahead = unhand.prefetch(source(), depth=5)
    next(ahead), next(ahead)
    raises(ValueError, lambda: next(ahead))
    raises(StopIteration, lambda: next(ahead))


def check_prefetch_leaves_nothing_behind():
    gc.collect()
    base = torch.cuda.memory_allocated()
    closed = []

    def source():
        try:
            yield from batches_of(10)
        finally:
            closed.append(True)

    for batch in unhand.prefetch(source(), depth=4):
        break
    del batch
    assert torch.cuda.memory_allocated() == base and closed == [True]
    with unhand.prefetch(source(), depth=4) as ahead:
        next(ahead)
    assert torch.cuda.memory_allocated() == base and closed == [True] * 2
    raises(StopIteration, lambda: next(ahead))

    def fail():
        for _ in unhand.prefetch(source(), depth=4):
            raise ValueError("in the loop")

    raises(ValueError, fail)
    gc.collect()
    assert torch.cuda.memory_allocated() == base and closed == [True] * 3


def check_prefetch_when_memory_runs_out():
    gc.collect()
    torch.cuda.empty_cache()
    # Room for seven batches.
    torch.cuda.set_per_process_memory_fraction(128 * MIB / TOTAL_BYTES)

    def source(n):
        return (torch.full((16 * MIB,), index, dtype=torch.uint8) for index in range(n))

    found = []
    for batch in unhand.prefetch(source(12), depth=20, pin=False):
        found.append(batch[0].item())
        del batch
    assert found == list(range(12))
    found.clear()
    ahead = unhand.prefetch(source(40), depth=5, pin=False)
    waiting = []
    n_ooms = torch.cuda.memory_stats()["num_ooms"]
    for batch in ahead:
        found.append(batch[0].item())
        waiting.append(ahead.waiting_bytes >> 24)
        del batch
        if len(found) == 2:
            # A neighbour takes the room of the one that was just used.
            ballast = [empty(8 * MIB) for _ in range((128 - (torch.cuda.memory_allocated() >> 20)) // 8)]
        if len(found) == 12:
            del ballast
    assert found == list(range(40))
    assert waiting[0] == 5 and min(waiting[2:12]) < 5 and max(waiting[12:]) == 5, waiting
    # What did not fit is not tried with each batch.
    n_ooms = torch.cuda.memory_stats()["num_ooms"] - n_ooms
    assert 1 <= n_ooms <= 5, n_ooms
    raises(torch.OutOfMemoryError, lambda: next(unhand.prefetch([torch.empty(256 * MIB, dtype=torch.uint8)], pin=False)))
    torch.cuda.set_per_process_memory_fraction(WHOLE)


if __name__ == "__main__":
    _fitting.forget()
    assert _accumulate._checked == set()
    main(globals())
