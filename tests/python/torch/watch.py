"""What `unhand.watch` tells of loops that leak, that it tells nothing of clean ones, and that it leaves nothing behind."""

# stand-in: UNHAND_STANDIN_MEMORY=8GiB

import collections
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
import weakref

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import _loops
import torch
from bench import main, raises

import unhand
from unhand import _births

MIB = 1 << 20


def big(mib=1):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def leak_for(n_steps, **options):
    """A watched loop that gathers a block a step in a variable `history`; the watch, and what it told."""
    told, history = [], []
    watch = unhand.watch(range(n_steps), on_leak=told.append, **options)
    for _ in watch:
        history.append(big())
    return watch, told


def check_nothing_happens_before_cuda_is_started():
    assert not torch.cuda.is_initialized()
    watch = unhand.watch(range(30))
    for _ in watch:
        pass
    verdict = watch.verdict()
    assert not torch.cuda.is_initialized()
    assert verdict.kind == "warming up" and verdict.device is None and verdict.allocated_bytes is None, verdict
    assert "no device" in str(verdict) and json.loads(json.dumps(verdict.to_dict()))["forecast"] is None


def check_clean_loops_are_not_told():
    wrong = []
    for loop in _loops.CLEAN:
        told = []
        watch = unhand.watch(range(150), on_leak=told.append)
        loop(watch)
        wrong += [f"{loop.__name__}: {verdict}" for verdict in told]
        assert watch.verdict().step == 150, loop
    assert not wrong, "\n".join(wrong)


def check_leaks_are_told_with_their_holder():
    # All of them are in benches/python/watch.py; these take the least time to be told apart.
    names = ("host_copies_with_graphs", "second_derivatives", "hook_that_gathers", "unbounded_cache", "exceptions", "cycles", "in_noise")
    wrong = []
    for loop, words in _loops.LEAKING:
        if loop.__name__ not in names:
            continue
        told = []
        loop(unhand.watch(range(50), on_leak=told.append, patience=16))
        if len(told) != 1 or not told[0].growers or words not in (told[0].kind, *words_of(told[0].growers[0], words)):
            wrong.append(f"{loop.__name__}: {told}")
    assert not wrong, "\n".join(wrong)


def words_of(grower, words):
    return [words] if any(words in path for path in grower.paths) else []


def check_what_is_made_anew_and_larger_is_told_later():
    told = []
    _loops.growing_tensor(unhand.watch(range(120), on_leak=told.append, patience=16))
    verdict, = told
    assert verdict.is_leak and verdict.step > 4 * 16, verdict
    grower = verdict.growers[0]
    assert grower.is_replaced and "local `predictions`" in grower.path and grower.bytes_per_step == 8192, grower


def check_figures_of_a_leak():
    watch, told = leak_for(200)
    verdict, = told
    assert verdict.kind == "leak" and verdict.is_leak and verdict.since_step == 4 and 100 < verdict.step < 150, verdict
    assert verdict.growth_bytes_per_step == verdict.low_bytes_per_step == verdict.high_bytes_per_step == MIB, verdict
    assert verdict.growth_blocks_per_step == 1 and verdict.device == 0
    grower = verdict.growers[0]
    assert grower.bytes_per_step == MIB and "local `history`" in grower.path and grower.kind == "container", grower
    assert grower.limit is None and not grower.is_replaced and grower.site is None
    later = watch.verdict()
    assert later.kind == "leak" and later.step == 200 and later.growers == verdict.growers
    assert later.forecast.steps == later.forecast.room_bytes // MIB < verdict.forecast.steps
    assert later.allocated_bytes == torch.cuda.memory_allocated() + 200 * MIB, "the list is gone, the figures are of then"
    plain = json.loads(json.dumps(verdict.to_dict()))
    assert plain["schema_version"] == 1 and plain["growers"][0]["paths"] and plain["forecast"]["steps"] > 0
    assert set(plain) == {"schema_version", *verdict.__slots__}
    html = verdict._repr_html_()
    assert "history" in html and "<table" in html and "<script" not in html
    assert str(verdict).startswith("leak on cuda:0: 1.0 MiB a step more allocated since step 4, at step ")


def check_the_forecast_comes_true():
    told, history = [], []
    torch.cuda.empty_cache()
    watch = unhand.watch(on_leak=told.append)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * MIB) / total)
    try:
        for step in range(1, 1000):
            history.append(big(4))
            watch.step()
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    verdict, = told
    # A hundred steps until it is full: an eighth of them is less than the least patience.
    assert verdict.step < 45, verdict
    assert abs(verdict.step + verdict.forecast.steps - step) <= 6, (verdict, step)


def check_a_leak_is_raised():
    error = None
    try:
        for _ in unhand.watch(range(100), on_leak="raise", patience=16):
            globals().setdefault("planted", []).append(big())
    except unhand.LeakError as raised:
        error = raised
    del globals()["planted"]
    assert error.verdict.is_leak and "__main__.planted" in str(error) and error.__context__ is None


def check_a_leak_is_warned_of_at_the_loop():
    history = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in unhand.watch(range(60), on_leak="warn", patience=16):
            history.append(big())
    warning, = seen
    assert "local `history`" in str(warning.message) and warning.filename == __file__, warning


def check_each_so_many_steps():
    _, told = leak_for(300, every=5, patience=80)
    verdict, = told
    assert verdict.growth_bytes_per_step == MIB and verdict.growers[0].bytes_per_step == MIB, verdict
    assert verdict.since_step <= 9 and verdict.growth_blocks_per_step == 1, verdict


def check_a_container_with_a_limit_is_no_leak():
    told = []
    watch = unhand.watch(range(200), on_leak=told.append, patience=16)
    _loops.replay_buffer(watch)
    verdict = watch.verdict()
    assert not told and verdict.kind == "filling", verdict
    grower = verdict.growers[0]
    assert grower.limit == 250 and 16 < grower.n_entries < 60 and "local `buffer`" in grower.path, grower


def check_a_leak_beside_a_container_with_a_limit_is_told_when_that_is_full():
    buffer, history, told = collections.deque(maxlen=60), [], []
    for index in unhand.watch(range(220), on_leak=told.append, patience=16):
        buffer.append(big())
        if index >= 50:
            history.append(big())
    assert len(told) == 1 and "local `history`" in told[0].growers[0].path and 60 < told[0].step < 200, told


def check_what_comes_back_is_let_grow_longer_the_next_time():
    told, history = [], []
    watch = unhand.watch(range(500), on_leak=told.append, patience=32)
    for index in watch:
        if index in (140, 280):
            history.clear()
        if index < 360:
            history.append(big())
        if index == 145:
            assert watch.verdict().kind in ("periodic", "varying", "step"), watch.verdict()
    assert len(told) == 1 and told[0].step < 100, told
    # It grew until step 360, and is flat since.
    assert watch.verdict().kind == "step" and watch.verdict().growers == (), watch.verdict()


def check_kinds_without_growth():
    def kind(sizes):
        watch = unhand.watch(sizes, on_leak=None)
        for size in watch:
            kept = big(size)
        del kept
        return watch.verdict()

    assert kind([1] * 10).kind == "warming up"
    assert kind([1] * 60).kind == "steady"
    assert kind([1] * 30 + [5] * 60).kind == "step"
    found = kind([1, 1, 1, 7] * 20)
    assert found.kind == "periodic" and found.period_steps == 4 and found.spread_bytes == 6 * MIB, found
    assert found.headline().endswith("it repeats every 4 steps")


def check_fragmentation_is_told_without_a_look():
    """Each block is a little larger than what the one before has left."""
    records, logger = [], logging.getLogger("unhand")
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    logger.propagate = False
    torch.cuda.empty_cache()
    kept = big(400)
    del kept
    torch.cuda.empty_cache()
    # No leak: it is logged and not raised.
    watch = unhand.watch(range(60), on_leak="raise", patience=16)
    try:
        for index in watch:
            kept = big(12 + 2 * index)
            del kept
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    verdict = watch.verdict()
    text, = [record.getMessage() for record in records]
    assert text.startswith("fragmentation on cuda:0") and "compact" in text and "more reserved" in text, text
    assert verdict.kind == "fragmentation" and not verdict.is_leak and verdict.growth_bytes_per_step > 10 * MIB, verdict
    assert verdict.growers == () and verdict.look_seconds is None and verdict.forecast.steps > 0
    torch.cuda.empty_cache()


def check_the_line_that_allocated():
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        _, told = leak_for(60, patience=16)
        assert torch._C._cuda_isHistoryEnabled(), "somebody else's recording goes on"
    finally:
        torch.cuda.memory._record_memory_history(None)
    site = told[0].growers[0].site
    assert site.startswith("watch.py:") and site.endswith("big()"), site


def check_no_batch_is_kept():
    class Batch:
        pass

    made = []

    def batches():
        for _ in range(5):
            batch = Batch()
            made.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in unhand.watch(batches()):
        del batch
        # The generator above has its own until it goes on; before that one, none is left.
        assert all(one() is None for one in made[:-1])
    for batch in unhand.watch([Batch() for _ in range(3)]):
        pass
    last = weakref.ref(batch)
    del batch
    assert last() is None


def check_it_is_used_like_what_it_watches():
    watch = unhand.watch([1, 2, 3])
    assert len(watch) == 3 and list(watch) == [1, 2, 3] and list(watch) == [1, 2, 3] and watch.n_steps == 6
    assert list(unhand.watch(iter("ab"))) == ["a", "b"] and bool(unhand.watch())
    raises(TypeError, lambda: len(unhand.watch(iter("ab"))))
    raises(TypeError, lambda: iter(unhand.watch()), "step()")
    raises(TypeError, lambda: unhand.watch(5), "int")
    for options in ({"every": 0}, {"patience": 0}, {"warmup": -1}, {"on_leak": "shout"}):
        raises(ValueError, lambda: unhand.watch(**options))
    raises(ValueError, lambda: unhand.watching(interval_s=0))


def check_nothing_is_left_behind():
    torch.cuda.reset_peak_memory_stats()
    kept = big(100)
    del kept
    peak = torch.cuda.max_memory_allocated()
    for n_steps in (25, 60):
        # 25 steps end in the middle of the look.
        watch, told = leak_for(n_steps, patience=16)
        assert bool(told) == (n_steps == 60)
        watch.close()
        assert not torch._C._cuda_isHistoryEnabled() and _births._recording.n_marks == 0
    history = []
    for step in unhand.watch(range(60), on_leak=None, patience=16):
        history.append(big())
        if step == 24:
            assert torch._C._cuda_isHistoryEnabled()
            break
    assert not torch._C._cuda_isHistoryEnabled() and _births._recording.n_marks == 0
    assert torch.cuda.max_memory_allocated() >= peak
    history.clear()
    gc.collect()
    alive = weakref.ref(watch)
    del watch, told
    assert alive() is None


def check_a_capture_is_not_disturbed():
    watch, history = unhand.watch(on_leak=None, patience=16), []
    for _ in range(24):
        history.append(big())
        watch.step()
    inputs = big()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(40):
            outputs = inputs + 1
            history.append(outputs)
            watch.step()
        assert watch.verdict().kind == "growing", watch.verdict()
    graph.replay()
    watch.close()


def check_a_thread_that_samples_ends_with_its_block():
    history = []

    def loop():
        with unhand.watching(interval_s=0.005, on_leak="raise", patience=16) as watch:
            assert any(thread.name == "unhand.watching" for thread in threading.enumerate())
            end = time.monotonic() + 60
            while watch._error is None and time.monotonic() < end:
                history.append(big())
                watch.step()
                time.sleep(0.005)

    raises(unhand.LeakError, loop, "history")
    assert not any(thread.name == "unhand.watching" for thread in threading.enumerate())


if __name__ == "__main__":
    main(globals())
