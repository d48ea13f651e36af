"""What `unhand.scope` says outlives a scope, against what does: kept, returned, yielded, held by exceptions and threads."""
# stand-in: UNHAND_STANDIN_DEVICES=2

import asyncio
import contextlib
import gc
import json
import os
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import torch
from bench import main, raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unhand
from unhand import _births, _scope

KIB = 1 << 10
HISTORY = []
CAN_SIGN = hasattr(torch._C, "_cuda_setMemoryMetadata")


def block(kib=1, device="cuda:0"):
    return torch.empty(kib * KIB, dtype=torch.uint8, device=device)


def survivors(scope):
    """Path to KiB of what outlived a scope."""
    return {leak.path: leak.bytes // KIB for leak in scope.result.survivors}


def check_before_cuda_is_started_nothing_is_done():
    assert not torch.cuda.is_initialized()
    with unhand.scope("early") as scope:
        pass
    assert not torch.cuda.is_initialized() and scope.result.devices == () and scope.result.is_exact
    assert "CUDA was not started" in str(scope) and unhand.log_dict() == {}
    with unhand.scope("first", strict=True) as scope:
        pass
    with unhand.scope("first") as scope:
        HISTORY.append(block(3))
    assert survivors(scope) == {"__main__.HISTORY[0]": 3}, str(scope)
    HISTORY.clear()
    block(1)


def check_what_is_appended_to_a_list_outside_is_named():
    with unhand.scope("eval") as scope:
        HISTORY.append(block(5))
        block(7)
    leak, = scope.result.survivors
    assert (leak.path, leak.kind, leak.bytes, leak.n_storages) == ("__main__.HISTORY[0]", "container", 5 * KIB, 1)
    assert leak.in_thread and leak.site is None and scope.result.survivors_bytes == 5 * KIB
    assert scope.result.grown_bytes == 5 * KIB and scope.result.is_exact and not scope.result.notes, str(scope)
    HISTORY.clear()


def check_what_was_there_before_is_not_named():
    HISTORY.append(block(5))
    with unhand.scope("eval") as scope:
        HISTORY.append(block(3))
    assert survivors(scope) == {"__main__.HISTORY[1]": 3}, str(scope)
    HISTORY.clear()


def check_a_local_variable_outlives_the_block():
    with unhand.scope("eval") as scope:
        left = block(2)
    (path, kib), = survivors(scope).items()
    assert kib == 2 and path.endswith("check_a_local_variable_outlives_the_block() local `left`"), path
    del left


def check_what_is_kept_is_not_named():
    box = {}
    with unhand.scope("eval", keep=(box, "named", "box2.inner", lambda: via)) as scope:
        box["in a container"] = block(1)
        named = block(2)

        class box2:
            inner = [block(3)]

        via = [block(4)]
        scope.keep(block(100))
        view = scope.keep(torch.empty(8 * KIB, dtype=torch.uint8, device="cuda")[5:9])
    assert scope.result.survivors == () and scope.result.kept_bytes == 18 * KIB, str(scope)
    assert not scope.result.notes
    del box, named, via, view


def check_a_view_that_is_kept_keeps_its_memory():
    cache = torch.empty(4, KIB, dtype=torch.uint8, device="cuda")
    with unhand.scope("eval") as scope:
        cache = torch.empty(4, 2 * KIB, dtype=torch.uint8, device="cuda")
        scope.keep(cache[0])
    assert scope.result.survivors == () and scope.result.kept_bytes == 8 * KIB, str(scope)
    del cache


def check_keep_prolongs_no_life():
    class Model:
        pass

    model = Model()
    model.weight, tensor = block(64), block(64)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with unhand.scope("eval", keep=(model, tensor)):
        del model, tensor
        assert torch.cuda.memory_allocated() == before - 128 * KIB


def check_a_name_that_is_not_there_is_told():
    with unhand.scope("eval", keep="missing") as scope:
        left = block(1)
    assert len(scope.result.survivors) == 1 and "no `missing`" in scope.result.notes[0], str(scope)
    del left


def check_what_a_function_returns_is_not_named():
    @unhand.scope("make", strict=True)
    def make(n):
        """Make some."""
        block(50)
        return {"a": block(n), "rest": [block(1)]}

    assert make.__name__ == "make" and make.__doc__ == "Make some."
    kept = make(3)
    assert make.scope.result.kept_bytes == 4 * KIB and make.scope.result.is_exact
    del kept


def check_a_loss_keeps_its_graph():
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    torch.cuda.synchronize()

    @unhand.scope("forward", strict=True)
    def forward():
        return (weight.exp() * weight).sum()

    loss = forward()
    assert forward.scope.result.kept_bytes >= 64 * 64 * 4, str(forward.scope)
    del loss


def check_strict_raises_with_the_answer():
    def leaking():
        with unhand.scope("eval", strict=True):
            HISTORY.append(block(5))

    text = raises(unhand.LeakError, leaking, "scope `eval`: 5.0 KiB outlive it, 1 holder keeps them")
    assert "__main__.HISTORY[0]" in text and issubclass(unhand.LeakError, unhand.Error)
    HISTORY.clear()
    try:
        unhand.scope("f", strict=True)(lambda: HISTORY.append(block(5)))()
    except unhand.LeakError as error:
        assert error.result.survivors_bytes == 5 * KIB
    HISTORY.clear()


def check_strict_sees_what_took_the_place_of_something_equal():
    HISTORY.append(block(5))
    with unhand.scope("plain") as plain:
        HISTORY[0] = None
        HISTORY[0] = block(5)
    assert plain.result.survivors == () and not plain.result.is_exact and "strict=True" in plain.result.notes[0]

    def replacing():
        with unhand.scope("strict", strict=True):
            HISTORY[0] = None
            HISTORY[0] = block(5)

    raises(unhand.LeakError, replacing, "__main__.HISTORY[0]")
    HISTORY.clear()


def check_an_exception_is_not_blamed_and_not_masked():
    def failing():
        inside = block(9)
        raise KeyError("mine")

    for strict in (False, True):
        caught = None
        try:
            with unhand.scope("eval", strict=strict) as scope:
                failing()
        except KeyError as error:
            caught = error
        assert caught is not None and caught.args == ("mine",) and scope.result.survivors == (), str(scope)
        excused, = scope.result.excused
        assert excused.kind == "traceback" and excused.bytes == 9 * KIB and "KeyError on its way" in excused.path
        assert "local `inside`" in excused.path and scope.result.error == "KeyError", excused
        assert not getattr(caught, "__notes__", ())
        del caught


def check_a_leak_beside_an_exception_becomes_a_note():
    caught = None
    try:
        with unhand.scope("eval", strict=True) as scope:
            HISTORY.append(block(5))
            raise KeyError("mine")
    except KeyError as error:
        caught = error
    assert survivors(scope) == {"__main__.HISTORY[0]": 5}
    if sys.version_info >= (3, 11):
        assert "HISTORY[0]" in caught.__notes__[0]
    HISTORY.clear()
    caught = None
    try:
        unhand.scope("f", strict=True)(lambda: [HISTORY.append(block(5)), 1 / 0])()
    except ZeroDivisionError as error:
        caught = error
    assert sys.version_info < (3, 11) or "HISTORY[0]" in caught.__notes__[0]
    HISTORY.clear()


def check_free_lets_go_of_what_nobody_meant_to_keep():
    class Node:
        pass

    def failing():
        inside = block(9)
        raise KeyError("mine")

    with unhand.scope("eval", free=True, strict=True) as scope:
        node = Node()
        node.me, node.data = node, block(64)
        del node
        try:
            failing()
        except KeyError as error:
            sys.last_value = error
        assert torch.cuda.memory_allocated() >= 73 * KIB
    assert scope.result.freed is not None and scope.result.survivors == (), str(scope)
    assert "free=True" in str(scope) and not hasattr(sys, "last_value")
    with unhand.scope("eval") as scope:
        node = Node()
        node.me, node.data = node, block(64)
        del node
    assert [leak.kind for leak in scope.result.survivors] == ["dead cycle"], str(scope)
    gc.collect()


def check_workspaces_are_excused():
    torch._C._cuda_clearCublasWorkspaces()
    with unhand.scope("product", strict=True) as scope:
        weight = torch.randn(64, 64, device="cuda")
        (weight @ weight).sum()
        del weight
    # Newer releases give the workspace back with the product.
    kinds = {leak.kind for leak in scope.result.excused}
    assert kinds == ({"workspace"} if scope.result.grown_bytes else set()) and scope.result.is_exact, str(scope)


def check_nested_scopes_are_a_tree():
    with unhand.scope("outer") as outer:
        for _ in range(3):
            with unhand.scope("inner"):
                HISTORY.append(block(2))
                block(8)
        with unhand.scope("other"):
            with unhand.scope("deep"):
                block(100)
        HISTORY.clear()
    tree = outer.result.tree
    inner, other = tree.children
    assert (tree.name, tree.n_calls, tree.handed_out_bytes, tree.survivors_bytes) == ("outer", 1, 130 * KIB, 0)
    assert (inner.name, inner.n_calls, inner.handed_out_bytes, inner.survivors_bytes) == ("inner", 3, 30 * KIB, 6 * KIB)
    assert (other.handed_out_bytes, other.children[0].name, other.children[0].handed_out_bytes) == (100 * KIB, "deep", 100 * KIB)
    assert outer.to_folded() == f"outer;inner {30 * KIB}\nouter;other;deep {100 * KIB}\n", outer.to_folded()
    assert outer.to_folded("survivors_bytes") == f"outer;inner {6 * KIB}\n"
    raises(ValueError, lambda: outer.to_folded("bytes"), "no figure to fold")
    assert _scope._current.get() is None


def check_peaks_are_known_where_they_are():
    torch.cuda.reset_peak_memory_stats()
    floor = torch.cuda.memory_allocated()
    peaks = torch.cuda.max_memory_allocated()
    with unhand.scope("high") as high:
        block(900)
    with unhand.scope("low") as low:
        kept = block(100)
    device, = [device for device in high.result.devices if device.device == 0]
    assert device.peak_allocated_bytes == floor + 900 * KIB == torch.cuda.max_memory_allocated() != peaks
    assert (device.allocated_before_bytes, device.allocated_after_bytes) == (floor, floor)
    assert device.handed_out_bytes == 900 * KIB and device.n_allocations == 1
    device = low.result.devices[0]
    assert device.peak_allocated_bytes is None
    assert (device.peak_at_least_bytes, device.peak_at_most_bytes) == (floor + 100 * KIB, floor + 900 * KIB)
    with unhand.scope("outer") as outer:
        with unhand.scope("reset"):
            torch.cuda.reset_peak_memory_stats()
    assert outer.result.devices[0].peak_at_most_bytes is None
    del kept


def check_looking_changes_no_counter():
    kept = [block(n) for n in (1, 30, 500)]

    def read():
        stats = torch.cuda.memory_stats()
        return {name: value for name, value in stats.items() if "peak" in name or "current" in name}

    before = read()
    with unhand.scope("outer", strict=True):
        with unhand.scope("inner", strict=True):
            pass
    assert read() == before
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    with unhand.scope("outer"):
        HISTORY.append(block(7))
    HISTORY.clear()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations + 1, "the look allocates nothing"
    del kept


def check_the_history_is_off_afterwards():
    assert not torch._C._cuda_isHistoryEnabled() and _births._recording.n_marks == 0 and not _scope._open


def check_sites_come_from_the_user_s_recording():
    torch.cuda.memory._record_memory_history(stacks="python")
    with unhand.scope("eval") as scope:
        HISTORY.append(block(5))
    assert torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(None)
    leak, = scope.result.survivors
    assert leak.site.startswith("scope.py:") and leak.site.endswith(" block()"), leak.site
    HISTORY.clear()


def check_a_generator_counts_what_it_does_itself():
    block()
    outside = []

    @unhand.scope("batches", strict=True)
    def batches(n):
        cache = []
        for i in range(n):
            cache.append(block(10))
            got = yield block(i + 1)
            assert got is None
        block(40)

    def consume():
        kept = []
        for batch in batches(3):
            kept.append(batch)
            outside.append(block(20))
        return kept

    kept = consume()
    assert batches.scope.result.tree.handed_out_bytes == (30 + 6 + 40) * KIB, str(batches.scope)
    assert batches.scope.result.kept_bytes == 6 * KIB, str(batches.scope)
    del kept
    outside.clear()

    @unhand.scope("leaky", strict=True)
    def leaky():
        HISTORY.append(block(5))
        yield block(1)

    raises(unhand.LeakError, lambda: list(leaky()), "__main__.HISTORY[0]")
    HISTORY.clear()
    assert _scope._current.get() is None


def check_a_generator_is_driven_as_without():
    log = []

    @unhand.scope("talk")
    def talk():
        try:
            got = yield 1
            log.append(got)
            try:
                yield 2
            except KeyError as error:
                log.append(error.args[0])
                yield 3
            yield 4
        finally:
            log.append("closed")

    generator = talk()
    assert [next(generator), generator.send("a"), generator.throw(KeyError("b"))] == [1, 2, 3]
    generator.close()
    assert log == ["a", "b", "closed"] and talk.scope.result.error is None and not _scope._open

    @unhand.scope("returns")
    def returns():
        yield from ()
        return 5

    def outer():
        return (yield from returns())

    try:
        next(outer())
    except StopIteration as stop:
        assert stop.value == 5

    @unhand.scope("fails")
    def fails():
        yield 1
        raise KeyError("c")

    raises(KeyError, lambda: list(fails()), "c")
    assert fails.scope.result.error == "KeyError" and not _scope._open


def check_tasks_do_not_blame_each_other():
    block()
    async def main_task():
        @unhand.scope("clean", strict=True)
        async def clean():
            for _ in range(5):
                block(3)
                await asyncio.sleep(0)
            return block(2)

        @unhand.scope("leaky")
        async def leaky():
            for _ in range(5):
                await asyncio.sleep(0)
                HISTORY.append(block(5))
            return 1

        results = await asyncio.gather(clean(), leaky(), clean())
        assert survivors(leaky.scope) == {"__main__.HISTORY": 25}, str(leaky.scope)
        assert clean.scope.result.kept_bytes == 2 * KIB and clean.scope.result.survivors == ()
        return results

    with unhand.scope("around") as around:
        asyncio.run(main_task())
    assert around.result.tree.children, "tasks inherit the scope they were made in"
    HISTORY.clear()


def check_async_with_and_its_neighbours():
    block()
    async def one(event, other):
        async with unhand.scope("one") as scope:
            event.set()
            await other.wait()
            HISTORY.append(block(5))
        return scope

    async def two(event, other):
        await event.wait()

        @unhand.scope("driven", strict=True)
        async def driven():
            kept = block(64)
            await asyncio.sleep(0)
            other.set()
            await asyncio.sleep(0)
            return kept

        return await driven()

    async def main_task():
        event, other = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(one(event, other), two(event, other))

    scope, kept = asyncio.run(main_task())
    assert survivors(scope) == {"__main__.HISTORY[0]": 5}, f"what `driven` allocated is not blamed on `one`: {scope}"
    assert any("not counted" in note for note in scope.result.notes)
    HISTORY.clear()


def check_async_generators():
    block()
    closed = []

    @unhand.scope("stream", strict=True)
    async def stream(n):
        try:
            for i in range(n):
                await asyncio.sleep(0)
                got = yield block(i + 1)
                closed.append(got)
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    async def main_task():
        kept = [item async for item in stream(3)]
        assert stream.scope.result.kept_bytes == 6 * KIB, str(stream.scope)
        generator = stream(3)
        assert await generator.asend(None) is not None
        assert await generator.asend("sent") is not None
        await generator.aclose()
        assert closed == [None, None, None, "closed", "sent", "closed"], closed

        @unhand.scope("failing")
        async def failing():
            try:
                yield 1
            except KeyError:
                yield 2
            raise ValueError("mine")

        generator = failing()
        assert await generator.asend(None) == 1 and await generator.athrow(KeyError()) == 2
        try:
            await generator.asend(None)
        except ValueError as error:
            assert error.args == ("mine",)
        assert failing.scope.result.error == "ValueError"
        return kept

    asyncio.run(main_task())
    assert not _scope._open


def check_a_cancelled_task_closes_its_scope():
    @unhand.scope("waits")
    async def waits():
        kept = block(3)
        await asyncio.sleep(100)
        return kept

    async def main_task():
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main_task())
    assert waits.scope.result.error == "CancelledError" and not _scope._open and waits.scope.result.survivors == ()


def check_threads_do_not_blame_each_other():
    block()
    start, stop = threading.Barrier(2), threading.Barrier(2)
    theirs = []

    def other():
        with unhand.scope("theirs"):
            start.wait()
            theirs.append(block(64))
            stop.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with unhand.scope("mine") as mine:
        start.wait()
        HISTORY.append(block(5))
        stop.wait()
    thread.join()
    found = survivors(mine)
    if CAN_SIGN:
        assert found == {"__main__.HISTORY[0]": 5}, str(mine)
        assert "not counted" in mine.result.notes[0] and mine.result.survivors[0].in_thread
    else:
        assert any("other threads ran" in note for note in mine.result.notes), str(mine)
    theirs.clear()
    HISTORY.clear()


def check_a_thread_without_a_scope_is_told():
    block()
    kept = {}
    thread = threading.Thread(target=lambda: (kept.setdefault("plain", block(64)), stop.wait()))
    stop = threading.Event()
    with unhand.scope("mine") as mine:
        thread.start()
        while "plain" not in kept:
            pass
        HISTORY.append(block(5))
    stop.set()
    thread.join()
    assert any("other threads ran" in note for note in mine.result.notes), str(mine)
    if CAN_SIGN:
        assert sorted(leak.in_thread is None for leak in mine.result.survivors) == [False, True], str(mine)
    HISTORY.clear()


def check_one_scope_object_many_times():
    scope = unhand.scope("again")
    with scope:
        with scope:
            HISTORY.append(block(1))
        assert survivors(scope) == {"__main__.HISTORY[0]": 1}
        HISTORY.append(block(2))
    assert scope.result.survivors_bytes == 3 * KIB
    HISTORY.clear()

    @unhand.scope("recursive", strict=True)
    def recursive(n):
        return [block(1), *(recursive(n - 1) if n else [])]

    kept = recursive(3)
    assert recursive.scope.result.tree.children[0].children[0].name == "recursive"
    raises(RuntimeError, lambda: scope.keep(1), "not open")
    raises(RuntimeError, lambda: scope.__exit__(None, None, None), "not open")
    raises(TypeError, lambda: scope(int), "decorates functions")
    del kept


def check_scopes_that_are_left_out_of_order():
    def holder():
        with unhand.scope("generator"):
            yield

    generator = holder()
    next(generator)
    with unhand.scope("consumer") as consumer:
        generator.close()
        with unhand.scope("inside"):
            block(1)
    assert _scope._innermost() is None and not _scope._open
    assert [child.name for child in consumer.result.tree.children] == ["inside"]


def check_exit_stack_and_bare_decorator():
    with contextlib.ExitStack() as stack:
        scope = stack.enter_context(unhand.scope("stack", keep="kept"))
        kept = block(2)
    assert scope.result.survivors == () and scope.result.kept_bytes == 2 * KIB, str(scope)
    bare = unhand.scope(lambda: block(1))
    assert bare() is not None and bare.scope.name.endswith("<lambda>")
    del kept


def check_other_devices():
    if torch.cuda.device_count() < 2:
        print("check_other_devices needs two devices", file=sys.stderr)
        return
    block(1, "cuda:1")
    with unhand.scope("both") as both, unhand.scope("one", device="cuda:1") as one:
        HISTORY.append(block(1, "cuda:0"))
        HISTORY.append(block(2, "cuda:1"))
    assert {leak.device: leak.bytes for leak in both.result.survivors} == {0: KIB, 1: 2 * KIB}, str(both)
    assert {leak.device: leak.bytes for leak in one.result.survivors} == {1: 2 * KIB}
    assert [device.device for device in both.result.devices] == [0, 1]
    HISTORY.clear()
    raises(ValueError, lambda: unhand.scope("cpu", device="cpu").__enter__(), "not a CUDA device")
    assert not _scope._open and _births._recording.n_marks == 0


def check_a_frequent_scope_is_not_looked_at_each_time():
    always, _scope._ALWAYS = _scope._ALWAYS, 2
    for n in range(1, 5):
        with unhand.scope("frequent") as scope:
            HISTORY.append(block(1))
        kinds = [leak.kind for leak in scope.result.survivors]
        assert kinds == (["unnamed"] if n == 3 else ["container"]), (n, str(scope))
        assert scope.result.survivors_bytes == KIB and scope.result.is_exact == (n != 3)
    raises(unhand.LeakError, lambda: unhand.scope("frequent", strict=True)(lambda: HISTORY.append(block(1)))(), "HISTORY[4]")
    _scope._ALWAYS = always
    HISTORY.clear()


def check_a_capture_is_not_looked_into():
    static = block(64)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with unhand.scope("captured", strict=True) as scope:
            kept = torch.empty(5000 * KIB, dtype=torch.uint8, device="cuda")
    assert any("captured" in note for note in scope.result.notes) and not scope.result.is_exact, str(scope)
    assert scope.result.survivors == ()
    del kept, static, graph


def check_every_answer_has_three_forms():
    with unhand.scope("outer") as scope:
        with unhand.scope("<inner>"):
            HISTORY.append(block(5))
    plain = json.loads(json.dumps(scope.to_dict()))
    assert plain == scope.result.to_dict() and plain["schema_version"] == 1
    assert set(plain) == {"schema_version", *scope.result.__slots__}
    assert plain["survivors"][0]["bytes"] == 5 * KIB and plain["tree"]["children"][0]["name"] == "<inner>"
    html = scope._repr_html_()
    assert "&lt;inner&gt;" in html and "HISTORY[0]" in html and "<inner>" not in html
    assert "not left yet" in str(unhand.scope("new")) and "not left yet" in unhand.scope("new")._repr_html_()
    raises(RuntimeError, unhand.scope("new").to_dict, "no answer yet")
    HISTORY.clear()


def check_a_log_dict_is_pytorch_s_own():
    kept = block(5)
    now = unhand.log_dict()
    assert now["gpu_memory/allocated_bytes"] == torch.cuda.memory_allocated()
    assert now["gpu_memory/reserved_bytes"] == torch.cuda.memory_reserved()
    assert now["gpu_memory/cached_bytes"] == torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert now["gpu_memory/peak_allocated_bytes"] == torch.cuda.max_memory_allocated()
    assert all(type(value) is int and name.startswith("gpu_memory/") for name, value in now.items())
    more = unhand.log_dict("cuda:0", prefix="", driver=True)
    free, total = torch.cuda.mem_get_info()
    assert (more["device_used_bytes"], more["device_total_bytes"]) == (total - free, total)
    with open(os.path.join(os.path.dirname(__file__), "..", "..", "..", "docs/guides/scope.md"), encoding="utf-8") as file:
        text = file.read()
    assert [name for name in more if f"`{name}`" not in text] == []
    raises(ValueError, lambda: unhand.log_dict("cpu"), "not a CUDA device")
    del kept


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(["make", "drop", "replace", "keep", "attach", "view", "open", "close"]), st.integers(0, 4)),
        max_size=20,
    ),
    st.booleans(),
)
def check_prop_survivors_are_those_of_a_plain_model(program, strict):
    """Slots hold tensors; scopes open and close in order. A plain list of who was born when says what must be named."""
    slots, born_at, kept, sizes = {}, {}, set(), [1, 2, 5, 700, 3000]
    stack, clock = [], 0
    holder = type("Holder", (), {})()
    for action, slot in [*program, *[("close", 0)] * 3]:
        clock += 1
        if action in ("make", "replace"):
            slots[slot] = block(sizes[slot])
            born_at[slot] = clock
            kept.discard(slot)
        elif action == "drop":
            slots.pop(slot, None)
        elif action == "view" and slot in slots:
            slots[slot] = slots[slot][1:]
        elif action == "attach" and slot in slots:
            holder.last = slots[slot]
            del holder.last
        elif action == "keep" and slot in slots and stack:
            stack[-1][0].keep(slots[slot])
            stack[-1][2].add((slot, born_at[slot]))
        elif action == "open" and len(stack) < 3:
            scope = unhand.scope(f"s{clock}", strict=strict)
            scope.__enter__()
            stack.append((scope, clock, set()))
        elif action == "close" and stack:
            scope, opened, declared = stack.pop()
            expected = sorted(
                slots[s].untyped_storage().data_ptr()
                for s in slots
                if born_at[s] > opened and (s, born_at[s]) not in declared
            )
            with contextlib.suppress(unhand.LeakError):
                scope.__exit__(None, None, None)
            result = scope.result
            n_found = sum(leak.n_storages for leak in result.survivors)
            if result.is_exact:
                assert n_found == len(expected), (expected, str(scope))
            else:
                assert not strict and n_found == 0, str(scope)
            for leak in result.survivors:
                assert "local `slots`" in leak.path or "slots" in leak.path, leak
    assert not _scope._open and not torch._C._cuda_isHistoryEnabled()


if __name__ == "__main__":
    main(globals())
