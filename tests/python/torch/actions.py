"""What gives memory back, one action at a time, with the real PyTorch: freed means that the storage is gone.

Run it with PYTORCH_CUDA_ALLOC_CONF unset and set to `expandable_segments:True`.
"""

import gc
import os
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import torch
from bench import main
from torch.multiprocessing.reductions import StorageWeakRef

from unhand import _actions, _allocator, _ladder as ladder

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def empty(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


def watch(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def released():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def done(action):
    assert action.error is None, action
    return action


class Cycle:
    def __init__(self, tensor):
        self.tensor, self.self = tensor, self


def fail(watches, size=8 * MIB):
    activation = empty(size)
    watches.append(watch(activation))
    raise RuntimeError("out of memory, pretended")


def failed(watches):
    try:
        fail(watches)
    except RuntimeError as error:
        return error


def check_nothing_happens_before_cuda_is_started():
    assert not torch.cuda.is_initialized()
    scene = _actions.scene()
    assert (scene.is_capturing, scene.n_graphs) == (False, 0)
    for action in (
        _actions.synchronize,
        _actions.workspaces,
        _actions.pinned_host_cache,
        _actions.ipc,
        _actions.autocast_cache,
        _actions.empty_cache,
        _actions.cudnn_dropout_state,
        _actions.compile_caches,
        lambda: _actions.fft_plans(0),
    ):
        answer = action()
        assert "has not started CUDA" in answer.error and answer.freed_bytes is None, answer
    assert _actions.collect().error is None and _actions.tracebacks().error is None
    assert _actions.notebook_history().error is None
    assert not torch.cuda.is_initialized()


def check_tracebacks_let_go_and_say_what_came_free():
    released()
    watches = []
    sys.last_value = failed(watches)
    assert not watches[0].expired()
    answer = done(_actions.tracebacks())
    assert watches[0].expired() and not hasattr(sys, "last_value")
    assert answer.freed_bytes == 8 * MIB and answer.count >= 1
    assert "RuntimeError in sys.last_value" in answer.detail, answer
    again = done(_actions.tracebacks())
    assert (again.freed_bytes, again.count, again.detail) == (0, 0, "no exception is remembered")


def check_an_exception_that_is_being_handled_is_left_alone():
    watches = []
    try:
        fail(watches)
    except RuntimeError as error:
        sys.last_value = error
        done(_actions.tracebacks())
        assert not watches[0].expired() and sys.last_value is error
        frame = error.__traceback__.tb_next.tb_frame
        assert "activation" in frame.f_locals
        del frame
    done(_actions.tracebacks())
    assert watches[0].expired()


def check_a_notebook_lets_go():
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        print("IPython is not installed: its real shell was not asked")
        return
    import contextlib
    import io

    shell, watches = InteractiveShell.instance(), []

    def run(cell):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            shell.run_cell(cell, store_history=True)

    shell.user_ns.update(fail=fail, watches=watches, empty=empty)
    run("fail(watches)")
    assert not watches[0].expired()
    answer = done(_actions.tracebacks())
    assert watches[0].expired() and answer.freed_bytes == 8 * MIB, answer
    run("x = {'output': empty(1000)}")
    run("x")
    watched = watch(shell.user_ns["x"]["output"])
    run("del x")
    assert not watched.expired()
    done(_actions.tracebacks())
    assert not watched.expired()
    answer = done(_actions.notebook_history())
    assert watched.expired() and answer.count == 1 and answer.freed_bytes == 1024, answer


def check_shown_values_go_only_when_they_hold_device_memory():
    import builtins

    module = torch.nn.Linear(8, 8, device="cuda")
    watches = [watch(module.weight)]
    builtins._ = {"best": [module]}
    del module
    assert done(_actions.notebook_history()).count == 0
    assert done(_actions.notebook_history(shell_too=True)).count == 1
    gc.collect()
    assert watches[0].expired() and not hasattr(builtins, "_")
    builtins._ = torch.ones(3)
    assert done(_actions.notebook_history(shell_too=True)).count == 0
    del builtins._


def check_dead_cycles_go_with_the_collector_off():
    released()
    gc.disable()
    try:
        cycle = Cycle(empty(8 * MIB))
        watched = watch(cycle.tensor)
        del cycle
        assert not watched.expired()
        answer = done(_actions.collect())
        assert watched.expired() and answer.freed_bytes == 8 * MIB and answer.count > 0
        assert "automatic collection is off" in answer.detail and not gc.isenabled()
    finally:
        gc.enable()


def check_frozen_cycles_go_too_and_the_rest_stays_frozen():
    released()
    cycle = Cycle(empty(8 * MIB))
    watched = watch(cycle.tensor)
    gc.freeze()
    try:
        del cycle
        gc.collect()
        assert not watched.expired()
        answer = done(_actions.collect())
        assert watched.expired() and answer.freed_bytes == 8 * MIB
        assert gc.get_freeze_count() > 0 and gc.isenabled() and "frozen again" in answer.detail
    finally:
        gc.unfreeze()


def check_workspaces_go_and_come_back():
    released()
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    layer = torch.nn.Linear(64, 64, device="cuda")
    output = layer(product).detach()
    held = ladder.ladder().workspaces_bytes
    before = torch.cuda.memory_allocated()
    answer = done(_actions.workspaces())
    assert before - torch.cuda.memory_allocated() == answer.freed_bytes >= held
    # Releases that keep a workspace: 2.15 makes one for each product and drops it.
    if held:
        assert ladder.ladder().workspaces_bytes == 0 and answer.freed_bytes >= 32 * MIB
        output = product @ product
        assert ladder.ladder().workspaces_bytes == held
    released()
    del layer, output


def check_nothing_a_graph_may_use_is_cleared():
    released()
    graph, source = torch.cuda.CUDAGraph(), torch.ones(64, 64, device="cuda")
    with torch.cuda.graph(graph):
        result = source @ source
    scene = _actions.scene()
    assert scene.n_graphs == 1 and not scene.is_capturing
    for action in (_actions.workspaces, _actions.pinned_host_cache, lambda: _actions.fft_plans(0)):
        answer = action()
        assert "1 live CUDA graph may use" in answer.error, answer
    gc.collect()
    gc.freeze()
    try:
        assert _actions.scene().n_graphs is None
        assert "may be there" in _actions.workspaces().error
    finally:
        gc.unfreeze()
    done(_actions.empty_cache())
    graph.replay()
    torch.cuda.synchronize()
    del result, graph
    gc.collect()
    assert _actions.scene().n_graphs == 0
    done(_actions.workspaces())
    assert done(_actions.empty_cache()).freed_bytes > 0
    assert torch.cuda.memory_reserved() == 0 or _reserved_outside_private_pools(), torch.cuda.memory_snapshot()
    del source


def _reserved_outside_private_pools():
    return all(segment.pool == _allocator.DEFAULT_POOL for segment in _allocator.segments(0))


def check_nothing_acts_during_a_capture():
    released()
    graph, source = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
    answers = {}

    def act(where):
        answers[where] = [
            _actions.synchronize(),
            _actions.empty_cache(),
            _actions.workspaces(),
            _actions.ipc(),
            _actions.autocast_cache(),
            _actions.pinned_host_cache(),
        ]

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = source + 1
        assert _actions.is_capturing()
        act("here")
        thread = threading.Thread(target=act, args=("elsewhere",))
        thread.start()
        thread.join()
    for where in ("here", "elsewhere"):
        for answer in answers[where]:
            assert answer.error == "a CUDA graph is being captured", (where, answer)
    assert not _actions.is_capturing()
    graph.replay()
    torch.cuda.synchronize()
    del graph, result
    assert done(_actions.empty_cache()).freed_bytes > 0


def check_fft_plans_go():
    for n in range(100, 110):
        torch.fft.fft(torch.ones(n, dtype=torch.complex64, device="cuda"))
    n_plans = torch.backends.cuda.cufft_plan_cache[0].size
    answer = done(_actions.fft_plans(0))
    assert answer.count == n_plans == 10 and answer.detail == "10 plans on cuda:0", answer
    assert torch.backends.cuda.cufft_plan_cache[0].size == 0 and answer.freed_bytes is not None
    assert done(_actions.fft_plans(0)).count == 0


def check_pinned_memory_goes_back():
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    kept = torch.empty(1 * MIB, dtype=torch.uint8, pin_memory=True)
    del pinned
    answer = done(_actions.pinned_host_cache())
    assert answer.freed_bytes == 4 * MIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before == 1 * MIB
    del kept
    assert done(_actions.pinned_host_cache()).freed_bytes == 1 * MIB


def check_autocast_copies_go():
    released()
    layer, batch = torch.nn.Linear(1024, 1024, device="cuda"), torch.ones(2, 1024, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer(batch)
        _actions.workspaces()
        answer = done(_actions.autocast_cache())
        assert answer.freed_bytes >= 2 * MIB, answer
        layer(batch)
    del layer


def check_empty_cache_says_what_the_driver_got():
    released()
    cached, kept = empty(64 * MIB), empty(1000)
    free_before = torch.cuda.mem_get_info()[0]
    expected = ladder.ladder().returnable_bytes
    assert done(_actions.empty_cache()).freed_bytes == expected
    del cached
    expected = ladder.ladder().returnable_bytes
    answer = done(_actions.empty_cache())
    assert answer.freed_bytes == expected >= 60 * MIB
    assert torch.cuda.mem_get_info()[0] - free_before == answer.freed_bytes and "cuda:0" in answer.detail
    del kept


def check_empty_cache_does_not_make_pytorch_crash():
    released()
    graph, source = torch.cuda.CUDAGraph(), empty(40 * MIB)
    with torch.cuda.graph(graph):
        intermediate = source + 1
        result = source[: 20 * MIB] + 1
        del intermediate
    del graph
    answer = _actions.empty_cache()
    if EXPANDABLE:
        # PyTorch would forget the pool here, and the free of `result` would be a segmentation fault.
        assert "would make PyTorch crash" in answer.error and answer.freed_bytes == 0, answer
    else:
        assert done(answer).freed_bytes >= 40 * MIB
    del result
    assert done(_actions.empty_cache()).freed_bytes >= 20 * MIB
    del source
    done(_actions.empty_cache())
    assert not [segment for segment in _allocator.segments(0) if segment.pool != _allocator.DEFAULT_POOL]


def check_an_error_is_told_and_not_raised():
    real = torch.cuda.synchronize
    kept = empty(1000)

    def broken(device=None):
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")

    torch.cuda.synchronize = broken
    try:
        answer = _actions.synchronize()
        assert answer.error == "RuntimeError: CUDA error: device-side assert triggered", answer
        assert _actions.workspaces().error == answer.error
    finally:
        torch.cuda.synchronize = real
    assert done(_actions.synchronize()).count == 1
    # The failed call's frames are not kept anywhere.
    watched = watch(kept)
    del kept
    assert watched.expired()


def check_what_is_only_done_when_asked_for():
    answer = _actions.cudnn_dropout_state()
    has_call = hasattr(torch._C, "_cudnn_clear_dropout_state")
    assert answer.error == (None if has_call else "this PyTorch has no call for it"), answer
    assert done(_actions.compile_caches()).detail == "torch.compile was not used"
    assert done(_actions.ipc()).freed_bytes == 0
    assert "torch._inductor" not in sys.modules


def check_no_action_keeps_what_it_saw():
    tensors = [empty(1000) for _ in range(10)]
    counts = [sys.getrefcount(tensor) for tensor in tensors]
    for action in (_actions.collect, _actions.tracebacks, _actions.notebook_history, _actions.empty_cache):
        action()
    _actions.scene()
    assert [sys.getrefcount(tensor) for tensor in tensors] == counts


if __name__ == "__main__":
    main(globals())
