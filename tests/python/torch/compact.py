"""`unhand.compact()` under the real PyTorch on the stand-in: what comes back, what stays, and that no byte changes."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading

import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "standin"))

from bench import main, raises

import unhand
from unhand import _relocate

MIB = 1 << 20
SETTINGS = (
    "expandable_segments:False",
    "expandable_segments:True",
    "expandable_segments:False,max_split_size_mb:64",
    "expandable_segments:False,max_split_size_mb:20",
    "expandable_segments:False,roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:2",
)


@contextlib.contextmanager
def settings(text):
    """A clean allocator under other settings."""
    released()
    assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
    torch.cuda.memory._set_allocator_settings(text)
    try:
        yield
    finally:
        released()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def released():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated() == 0 or torch.cuda.memory_allocated()


# Every tensor gets another stretch of this, so that a mix-up shows.
PATTERN = (torch.arange(16 * MIB, dtype=torch.int32) % 65_521 % 251).to(torch.uint8)


def fill(tensor, index):
    tensor.copy_(PATTERN[index : index + tensor.numel()])
    return tensor


def filled(size, index):
    return fill(torch.empty(size, dtype=torch.uint8, device="cuda"), index)


def fragmented(n_large=400, n_small=2000, fraction=10, seed=0):
    """Blocks of 0.75 to 8.5 MiB and small ones; one in `fraction` of the large survives, half as many of the small."""
    chance = random.Random(seed)
    sizes = [chance.choice([3, 7, 11, 17, 33]) * (1 << 18) + chance.randrange(1 << 18) for _ in range(n_large)]
    large = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    small = [torch.empty(chance.randrange(1, 200_000), dtype=torch.uint8, device="cuda") for _ in range(n_small)]
    kept = large[::fraction] + small[:: 2 * fraction]
    return [fill(tensor, index) for index, tensor in enumerate(kept)]


def is_filled(tensor, index):
    return torch.equal(tensor.cpu(), PATTERN[index : index + tensor.numel()])


def assert_filled(tensors):
    for index, tensor in enumerate(tensors):
        assert is_filled(tensor, index), index


def assert_consistent():
    """The snapshot and the counters say the same, and every block in use belongs to a tensor (no plug is left)."""
    segments = torch.cuda.memory_snapshot()
    stats = torch.cuda.memory_stats()
    assert sum(segment["total_size"] for segment in segments) == stats["reserved_bytes.all.current"]
    used = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    assert sum(block["size"] for block in used) == stats["active_bytes.all.current"]
    assert sum(block["requested_size"] for block in used) == stats["requested_bytes.all.current"]
    assert len(used) == stats["active.all.current"] == stats["allocation.all.current"]
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert {block["address"] for block in used} <= known


def requested():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def one_segment(text):
    return (32 if "expandable_segments:False" in text else 20) * MIB + 2 * MIB


def check_a_device_without_context_gets_none():
    assert not torch.cuda.is_initialized()
    answer = unhand.compact()
    assert answer.n_moved == 0 and answer.before.reserved_bytes == 0 and answer.note
    assert not torch.cuda.is_initialized()


def check_without_torch_there_is_nothing():
    script = "import unhand, sys\ntry:\n    unhand.compact()\nexcept unhand.Error as error:\n    print(error)\n"
    script += "assert 'torch' not in sys.modules"
    environment = {"PYTHONPATH": os.path.dirname(os.path.dirname(unhand.__file__)), "PATH": os.environ["PATH"]}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == "nothing to compact: torch is not imported\n", output


def check_what_fragmentation_held_comes_back():
    for text in SETTINGS:
        for fraction in (10, 20):
            with settings(text):
                kept = fragmented(fraction=fraction)
                torch.cuda.empty_cache()
                wanted, live = requested(), torch.cuda.memory_allocated()
                free = torch.cuda.mem_get_info()[0]
                assert torch.cuda.memory_reserved() > 2 * live
                answer = unhand.compact()
                reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
                assert reserved <= 1.03 * live + one_segment(text), (text, reserved, live)
                assert answer.after.reserved_bytes == reserved and answer.after.allocated_bytes == allocated
                assert answer.returned_bytes == torch.cuda.mem_get_info()[0] - free > live
                assert requested() == wanted
                assert answer.n_left == 0 and answer.n_other_allocations == 0 and answer.note is None, answer
                assert_filled(kept)
                assert_consistent()
                again = unhand.compact()
                assert again.before.reserved_bytes - again.after.reserved_bytes <= one_segment(text)
                del kept


def check_small_or_large_only():
    for text in SETTINGS:
        for n_large, n_small in ((0, 6000), (500, 0)):
            with settings(text):
                kept = fragmented(n_large, n_small)
                live = torch.cuda.memory_allocated()
                unhand.compact()
                assert torch.cuda.memory_reserved() <= 1.03 * live + one_segment(text), (text, n_large)
                assert_filled(kept)
                del kept


def check_equal_blocks_that_fill_no_segment_well():
    # Two blocks of 7 MiB leave 6 of 20 MiB empty, even without any fragmentation.
    with settings("expandable_segments:False"):
        kept = [filled(7 * MIB - 100, index) for index in range(40)]
        unhand.compact()
        assert torch.cuda.memory_reserved() <= 1.01 * torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert_filled(kept)
        del kept


def check_large_blocks_stuck_in_larger_segments():
    with settings("expandable_segments:False"):
        big = [torch.empty(60 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
        del big
        kept = [filled(12 * MIB + 300, index) for index in range(6)]
        for index in (1, 3):
            kept[index] = kept[index - 1]
        kept = [kept[0], kept[2], kept[4], kept[5]]
        values = [tensor.cpu() for tensor in kept]
        torch.cuda.empty_cache()
        unhand.compact()
        assert torch.cuda.memory_reserved() <= torch.cuda.memory_allocated() + 4 * MIB, torch.cuda.memory_reserved()
        assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(kept, values))
        del kept


def check_no_more_than_extra_is_used():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        for extra in (0, 8 * MIB, "40MiB", "0.25 GiB"):
            with settings(text):
                kept = fragmented()
                torch.cuda.empty_cache()
                live, before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                torch.cuda.reset_peak_memory_stats()
                answer = unhand.compact(extra=extra)
                limit = {"40MiB": 40 * MIB, "0.25 GiB": 256 * MIB}.get(extra, extra)
                assert answer.extra_limit_bytes == limit
                assert torch.cuda.max_memory_reserved() <= before + limit
                assert answer.extra_bytes == max(0, torch.cuda.max_memory_reserved() - before) <= limit
                assert torch.cuda.memory_reserved() <= 1.03 * live + one_segment(text), (text, extra)
                assert_filled(kept)
                del kept


def check_a_full_device():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        with settings(text):
            kept = fragmented()
            torch.cuda.empty_cache()
            live = torch.cuda.memory_allocated()
            # In whole pages or segments: it neither fills holes nor leaves any.
            hog = torch.empty(torch.cuda.mem_get_info()[0] // (20 * MIB) * 20 * MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.mem_get_info()[0] < 20 * MIB
            ooms = torch.cuda.memory_stats()["num_ooms"]
            answer = unhand.compact()
            assert torch.cuda.memory_stats()["num_ooms"] == ooms
            assert torch.cuda.memory_reserved() - hog.numel() <= 1.03 * live + one_segment(text), str(answer)
            assert_filled(kept)
            del hog, kept


def check_nothing_moves_in_a_dry_run():
    for text in SETTINGS:
        with settings(text):
            kept = fragmented()
            addresses = [tensor.data_ptr() for tensor in kept]
            snapshot = torch.cuda.memory_snapshot()
            stats = torch.cuda.memory_stats()
            dry = unhand.compact(dry_run=True)
            assert torch.cuda.memory_snapshot() == snapshot and torch.cuda.memory_stats() == stats
            assert [tensor.data_ptr() for tensor in kept] == addresses
            assert dry.is_dry_run and dry.returned_bytes is None and dry.n_moved > 100
            real = unhand.compact()
            assert dry.before == real.before
            difference = abs(dry.after.reserved_bytes - real.after.reserved_bytes)
            assert difference <= 0.06 * real.after.reserved_bytes + 32 * MIB, (text, dry.after, real.after)
            assert abs(dry.n_moved - real.n_moved) < 0.2 * real.n_moved
            del kept


def check_everything_that_shares_a_storage_follows():
    with settings("expandable_segments:False"):
        torch.manual_seed(0)
        filler = [torch.empty(MIB // 2 + 512 * index, dtype=torch.uint8, device="cuda") for index in range(64)]
        base = torch.randn(300, 200).cuda()
        row, turned, strided = base[7], base.t(), base[::3, 5::2]
        pieces = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(12)]
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).cuda()
        model[1].weight = model[0].weight
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"].copy_(torch.randn(state["exp_avg"].shape))
        others = [filled(100_000, index) for index in range(200)]
        half = torch.randn(1000).cuda().half()
        whole = torch.arange(100_000).cuda().reshape(10, 100, 100).permute(2, 0, 1)
        tensors = [base, row, turned, strided, half, whole, *model.parameters()]
        tensors += [parameter.grad for parameter in model.parameters()]
        tensors += [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
        values = [tensor.detach().cpu().clone() for tensor in tensors]
        shapes = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
        del filler, pieces, others
        answer = unhand.compact()
        assert answer.n_moved > 0, str(answer)
        for tensor, value, shape in zip(tensors, values, shapes):
            assert torch.equal(tensor.detach().cpu(), value)
            assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == shape
        assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert model[1].weight is model[0].weight
        row.fill_(7)
        assert bool((base[7].cpu() == 7).all())
        del base, row, turned, strided, model, optimizer, parameter, state, half, whole, tensors, tensor


def check_saved_tensors_move_and_backward_works():
    with settings("expandable_segments:False"):
        weight = torch.nn.Parameter(torch.ones(300, 1000, device="cuda"))
        filler = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(30)]
        hidden = weight * 2
        out = hidden.relu()
        more = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(31)]
        result = out.exp()
        result.data.copy_(torch.full(result.shape, 5.0))
        version = result._version
        del filler, more, hidden, out
        answer = unhand.compact()
        assert answer.n_moved >= 2 and not answer.skipped, str(answer)
        assert bool((result.grad_fn._saved_result.cpu() == 5).all())
        assert result._version == version
        result.sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape
        del result, weight


def check_streams_keep_their_blocks():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        with settings(text):
            streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
            handles = {stream.cuda_stream for stream in streams}
            kept = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    kept.append(fragmented(200, 1000))
            # The objects are gone, the streams are not.
            del stream, streams
            live = torch.cuda.memory_allocated()
            per_stream = collected_by_stream()
            answer = unhand.compact()
            assert not answer.skipped, str(answer)
            assert collected_by_stream() == per_stream and set(per_stream) == handles
            assert torch.cuda.memory_reserved() <= 1.03 * live + 3 * one_segment(text)
            for tensors in kept:
                assert_filled(tensors)
            del kept, tensors


def collected_by_stream():
    found = {}
    for segment in torch.cuda.memory_snapshot():
        used = sum(block["requested_size"] for block in segment["blocks"] if block["state"] != "inactive")
        found[segment["stream"]] = found.get(segment["stream"], 0) + used
    return found


def check_a_block_still_waits_for_the_stream_it_was_used_on():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        with settings(text):
            other = torch.cuda.Stream()
            kept = fragmented(100, 400)
            for tensor in kept:
                tensor.record_stream(other)
            addresses = [tensor.data_ptr() for tensor in kept]
            answer = unhand.compact()
            assert answer.n_moved > 5 and answer.n_left == 0, str(answer)
            assert_filled(kept)
            index = next(i for i, tensor in enumerate(kept) if tensor.data_ptr() != addresses[i])
            kept[index] = tensor = None
            stats = torch.cuda.memory_stats()
            assert stats["active.all.current"] == stats["allocation.all.current"] + 1
            del kept


def reasons(answer):
    return {skipped.reason: (skipped.n_blocks, skipped.bytes) for skipped in answer.skipped}


def check_what_must_stay_stays_and_is_named():
    with settings("expandable_segments:False"):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            private = filled(3 * MIB, 1)
        filler = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
        exported = filled(2 * MIB, 2)
        capsule = exported.__dlpack__()
        more = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
        consumed = filled(2 * MIB + 512, 3)
        consumer = torch.from_dlpack(consumed)
        rest = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
        lazy = filled(2 * MIB + 1024, 4)
        clone = lazy._lazy_clone()
        native = torch.cuda.caching_allocator_alloc(4 * MIB)
        last = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
        offered = filled(2 * MIB + 1536, 5)
        from torch.multiprocessing import reductions

        reductions.shared_cache["a handle"] = reductions.StorageWeakRef(offered.untyped_storage())
        moves = filled(2 * MIB + 2048, 6)
        del filler, more, rest, last
        still = [private, exported, consumed, lazy, offered]
        addresses = [tensor.untyped_storage().data_ptr() for tensor in still]
        answer = unhand.compact()
        assert [tensor.untyped_storage().data_ptr() for tensor in still] == addresses
        found = reasons(answer)
        assert found.pop(f"in the private pool {tuple(pool.id)}") == (1, 3 * MIB), answer
        assert found.pop("no Python tensor reaches them: workspaces, native code") == (1, 4 * MIB)
        assert found.pop("native code holds them too (a DLPack consumer, DDP, a C++ module)") == (1, 2 * MIB)
        assert found.pop("shared with another library (DLPack, or memory that is not PyTorch's)")[0] >= 1
        assert found.pop("shared with another process") == (1, 2 * MIB + 1536)
        assert not found, found
        del reductions.shared_cache["a handle"]
        torch.cuda.caching_allocator_delete(native)
        del capsule, consumer, clone
        after = unhand.compact()
        assert list(reasons(after)) == [f"in the private pool {tuple(pool.id)}"], str(after)
        tensors = (private, exported, consumed, lazy, offered, moves)
        assert all(is_filled(tensor, index) for index, tensor in enumerate(tensors, 1))
        del private, exported, consumed, lazy, offered, moves, still, pool, tensors


def check_nothing_moves_while_a_graph_is_alive():
    global trainer_graph
    with settings("expandable_segments:False"):
        kept = fragmented(60, 100)
        addresses = [tensor.data_ptr() for tensor in kept]
        trainer_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(trainer_graph):
            message = raises(unhand.CaptureError, unhand.compact)
            raises(unhand.CaptureError, lambda: unhand.compact(dry_run=True))
            kept[0].add_(0)
        assert "captured" in message
        answer = unhand.compact()
        assert answer.n_moved == 0 and [tensor.data_ptr() for tensor in kept] == addresses
        assert len(answer.skipped) == 1 and "trainer_graph" in answer.skipped[0].where, answer.skipped
        assert answer.skipped[0].n_blocks >= len(kept)
        trainer_graph.reset()
        answer = unhand.compact()
        assert answer.n_moved > 0
        assert_filled(kept)
        trainer_graph = None
        del kept


def check_a_capture_on_another_stream_is_noticed():
    with settings("expandable_segments:False"):
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        x = torch.zeros(10, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            x.add_(1)
        raises(unhand.CaptureError, unhand.compact, "is being captured on")
        with torch.cuda.stream(stream):
            graph.capture_end()
        del graph, x


@contextlib.contextmanager
def failing_at(count, error):
    """The k-th move fails, before or after it happened."""
    real = _relocate.Relocation._move
    calls = [0]

    def move(self, block, address):
        calls[0] += 1
        if calls[0] == count:
            raise error
        real(self, block, address)

    _relocate.Relocation._move = move
    try:
        yield
    finally:
        _relocate.Relocation._move = real


def check_a_failure_on_the_way_loses_nothing():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        for count in (1, 60):
            for error in (RuntimeError("broken"), KeyboardInterrupt()):
                with settings(text):
                    kept = fragmented(200, 1000)
                    wanted = requested()
                    with failing_at(count, error):
                        try:
                            unhand.compact()
                        except type(error) as raised:
                            assert raised is error
                        else:
                            raise AssertionError("no error")
                    assert error.compacted.n_moved == count - 1, error.compacted
                    assert requested() == wanted
                    assert_consistent()
                    assert_filled(kept)
                    unhand.compact()
                    assert_filled(kept)
                    del kept


def check_out_of_memory_on_the_way_ends_in_an_answer():
    for count in (1, 7):
        with settings("expandable_segments:False"):
            kept = fragmented(200, 1000)
            live = torch.cuda.memory_allocated()
            with failing_at(count, torch.cuda.OutOfMemoryError("pretended")):
                answer = unhand.compact()
            assert torch.cuda.memory_reserved() <= 1.03 * live + one_segment("expandable_segments:False"), str(answer)
            assert_consistent()
            assert_filled(kept)
            del kept


def check_a_real_refusal_of_the_device_is_survived():
    # The device has less than `mem_get_info` says: the allocator meets it, not the arithmetic before it.
    for text in ("expandable_segments:False", "expandable_segments:True"):
        with settings(text):
            kept = fragmented()
            torch.cuda.empty_cache()
            live, before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            hog = torch.empty(torch.cuda.mem_get_info()[0] // (20 * MIB) * 20 * MIB, dtype=torch.uint8, device="cuda")
            real = torch.cuda.mem_get_info
            torch.cuda.mem_get_info = lambda device=None: (4 << 30, real(device)[1])
            try:
                answer = unhand.compact()
            finally:
                torch.cuda.mem_get_info = real
            assert torch.cuda.memory_reserved() - hog.numel() <= before
            assert torch.cuda.memory_reserved() - hog.numel() <= 1.25 * live, str(answer)
            assert_consistent()
            assert_filled(kept)
            del hog, kept


@contextlib.contextmanager
def interrupt_at(count):
    real = _relocate.Relocation._alloc
    calls = [0]

    def alloc(self, size, group):
        calls[0] += 1
        if calls[0] == count:
            signal.raise_signal(signal.SIGINT)
        return real(self, size, group)

    _relocate.Relocation._alloc = alloc
    try:
        yield
    finally:
        _relocate.Relocation._alloc = real


def check_an_interrupt_waits_for_the_end_of_a_move():
    with settings("expandable_segments:False"):
        kept = fragmented(200, 1000)
        wanted = requested()
        handler = signal.getsignal(signal.SIGINT)
        with interrupt_at(50):
            try:
                unhand.compact()
            except KeyboardInterrupt as error:
                assert error.compacted.note == "stopped early: interrupted", error.compacted
            else:
                raise AssertionError("not interrupted")
        assert signal.getsignal(signal.SIGINT) is handler
        assert requested() == wanted
        assert_consistent()
        assert_filled(kept)
        # Somebody's own handler that takes note: an answer, and no exception.
        noted = []
        signal.signal(signal.SIGINT, lambda *arguments: noted.append(arguments))
        try:
            with interrupt_at(2):
                answer = unhand.compact()
        finally:
            signal.signal(signal.SIGINT, handler)
        assert len(noted) == 1 and answer.note == "stopped early: interrupted" and answer.n_left > 0
        assert_filled(kept)
        del kept


def check_a_frozen_graph_is_thought_of():
    with settings("expandable_segments:False"):
        kept = fragmented(60, 100)
        pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        x = torch.zeros(10, device="cuda")
        with torch.cuda.graph(graph):
            y = x + 1
        gc.freeze()
        try:
            answer = unhand.compact()
            assert answer.n_moved == 0 and "gc.freeze" in answer.skipped[0].where, str(answer)
        finally:
            gc.unfreeze()
        where = unhand.compact().skipped[0].where
        assert where == "graph in check_a_frozen_graph_is_thought_of()", where
        del graph, x, y, pool
        assert_filled(kept)
        del kept


def check_inside_a_pool_nothing_is_lost():
    with settings("expandable_segments:False"):
        kept = fragmented(60, 100)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            answer = unhand.compact()
        assert answer.n_moved == 0 and "use_mem_pool" in answer.note, str(answer)
        assert_filled(kept)
        del pool
        released()
        assert_consistent()
        assert unhand.compact().n_moved > 0
        assert_filled(kept)
        del kept


def check_other_threads_may_allocate():
    for text in ("expandable_segments:False", "expandable_segments:True"):
        with settings(text):
            kept = fragmented(300, 1500)
            stop = threading.Event()
            failures = []

            def allocate(seed):
                chance = random.Random(seed)
                held = []
                while not stop.is_set():
                    try:
                        held.append(torch.empty(chance.randrange(1, 4 * MIB), dtype=torch.uint8, device="cuda"))
                        if len(held) > 8:
                            held.pop(chance.randrange(len(held)))
                    except Exception as error:
                        failures.append(error)
                        return

            threads = [threading.Thread(target=allocate, args=(seed,)) for seed in range(2)]
            for thread in threads:
                thread.start()
            try:
                answers = [unhand.compact() for _ in range(3)]
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert not failures, failures
            assert any(answer.n_other_allocations for answer in answers)
            assert_filled(kept)
            gc.collect()
            assert_consistent()
            del kept


def check_no_reference_is_left_behind():
    with settings("expandable_segments:False"):
        kept = fragmented(200, 1000)
        graph = torch.nn.Parameter(torch.ones(1000, device="cuda")).exp()
        gc.collect()
        gc.disable()
        try:
            unhand.compact()
            unhand.compact(dry_run=True)
            with failing_at(1, RuntimeError("broken")), contextlib.suppress(RuntimeError):
                unhand.compact()
            del kept, graph
            assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
        finally:
            gc.enable()


def check_random_histories():
    for seed in range(12):
        text = SETTINGS[seed % len(SETTINGS)]
        with settings(text):
            history(random.Random(seed), text)


def history(chance, text):
    """Allocations, frees, resizes and compactions in any order; the values are compared at the end of each part."""
    live = {}
    number = 0
    limits = (4000, 3 * MIB, 14 * MIB)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for _ in range(4):
        for _ in range(160):
            if live and chance.random() < 0.45:
                del live[chance.choice(list(live))]
                continue
            number += 1
            with torch.cuda.stream(chance.choice(streams)):
                live[number] = filled(chance.randrange(1, chance.choice(limits)), number)
        torch.cuda.synchronize()
        for key in chance.sample(list(live), len(live) * 2 // 3):
            del live[key]
        extra = chance.choice([None, 0, 30 * MIB])
        wanted, before = requested(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        answer = unhand.compact(extra=extra)
        assert torch.cuda.max_memory_reserved() <= before + answer.extra_limit_bytes, (text, str(answer))
        assert torch.cuda.memory_reserved() <= before, (text, before, str(answer))
        assert requested() == wanted, (text, requested() - wanted)
        assert answer.n_other_allocations == 0
        assert_consistent()
        for key, value in live.items():
            assert is_filled(value, key), (text, key)


def check_wrong_arguments():
    for extra in (-1, "many", "5 XB", 1.5, True, ""):
        raises(ValueError, lambda: unhand.compact(extra=extra))
    raises(unhand.Error, lambda: unhand.compact(device="cpu"), "only a CUDA device")
    raises(unhand.Error, lambda: unhand.compact(device=7), "no such device")
    for device in (0, "cuda", "cuda:0", torch.device("cuda:0"), None):
        assert unhand.compact(device=device).device == 0


def check_the_answer_in_three_forms():
    with settings("expandable_segments:False"):
        kept = fragmented(60, 100)
        answer = unhand.compact()
        values = json.loads(json.dumps(answer.to_dict()))
        assert values["before"]["reserved_bytes"] == answer.before.reserved_bytes
        assert values["n_moved"] == answer.n_moved and values["skipped"] == []
        assert str(answer).startswith(f"cuda:0: moved {answer.n_moved} storages, ")
        assert "cuda:0: moved" in answer._repr_html_() and "reserved" in answer._repr_html_()
        del kept


if __name__ == "__main__":
    main(globals())
