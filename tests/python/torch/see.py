"""What `unhand.report` and `unhand.holders` say of holders that are planted, and that looking leaves nothing behind."""

import asyncio
import functools
import gc
import os
import sys
import threading
import weakref

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import unhand
from unhand import _native

MIB = 1 << 20


def big(mib=8):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


class Net(nn.Module):
    def __init__(self, width=256, depth=3):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        return self.layers(x).tanh()


def holder(words, kind=None, n_bytes=None):
    """The holder with these words in one of its paths."""
    found = unhand.report()
    fitting = [
        holder for device in found.devices for holder in device.holders if any(words in path for path in holder.paths)
    ]
    assert fitting, f"no holder `{words}` in\n{found}"
    best = max(fitting, key=lambda holder: (holder.kind == kind, holder.bytes))
    assert kind is None or best.kind == kind, f"kind {best.kind}, not {kind}:\n{best}"
    assert n_bytes is None or best.bytes == n_bytes, f"{best.bytes} bytes, not {n_bytes}:\n{best}"
    return best


def check_a_global():
    globals()["planted"] = big()
    found = holder("__main__.planted", "global", 8 * MIB)
    assert found.is_alone and found.path == "__main__.planted"
    del globals()["planted"]


def check_two_names():
    globals()["one"] = globals()["two"] = big()
    found = holder("__main__.one", "global", 8 * MIB)
    assert set(found.paths) == {"__main__.one", "__main__.two"} and not found.is_alone
    del globals()["one"], globals()["two"]


def check_a_local_of_a_running_function():
    kept = big()
    found = holder("local `kept`", "frame", 8 * MIB)
    assert "see.py" in found.path and "check_a_local_of_a_running_function()" in found.path
    assert kept is not None


def check_a_list_of_many():
    globals()["history"] = [big(1) for _ in range(20)]
    found = holder("__main__.history", "container", 20 * MIB)
    assert found.path == "__main__.history" and found.n_storages == 20 and found.type == "list"
    del globals()["history"]


def check_a_graph_that_hangs_on_a_loss():
    model = Net().cuda()
    globals()["losses"] = [model(torch.randn(4096, 256, device="cuda", requires_grad=True)).sum() for _ in range(3)]
    # Three activations a step and what tanh saved are 4 MiB each.
    found = holder("__main__.losses", "autograd graph")
    assert found.bytes >= 3 * 3 * 4 * MIB, found
    del globals()["losses"]


def check_parameters_shared_with_the_optimizer():
    model = Net().cuda()
    globals()["net"], globals()["adam"] = model, torch.optim.AdamW(model.parameters())
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    del model
    found = holder("__main__.net", "parameters", n_bytes)
    assert found.path == "__main__.net.layers" and any("__main__.adam" in path for path in found.paths)
    globals()["net"](torch.randn(4, 256, device="cuda")).sum().backward()
    globals()["adam"].step()
    holder("__main__.adam.state", "optimizer state")
    holder("__main__.net", "gradients")
    del globals()["net"], globals()["adam"]


def check_a_traceback():
    def fails():
        inside = big()
        raise ValueError(inside.shape)

    try:
        fails()
    except ValueError as error:
        sys.last_value = error
    found = holder("sys.last_value", "traceback", 8 * MIB)
    assert "see.py" in found.path and "fails() local `inside`" in found.path, found.path
    del sys.last_value


def check_a_generator():
    def generate():
        inside = big()
        yield inside.shape

    globals()["generator"] = generate()
    next(globals()["generator"])
    found = holder("__main__.generator", "generator", 8 * MIB)
    assert "local `inside`" in found.path
    del globals()["generator"]


def check_a_task():
    async def work(started, end):
        inside = big()
        started.set()
        await end.wait()
        return inside.shape

    async def run():
        started, end = asyncio.Event(), asyncio.Event()
        globals()["task"] = asyncio.create_task(work(started, end))
        await started.wait()
        found = holder("local `inside`", None, 8 * MIB)
        end.set()
        await globals().pop("task")
        return found

    assert asyncio.run(run()).kind == "task"


def check_a_thread():
    started, end = threading.Event(), threading.Event()

    def work():
        inside = big()
        started.set()
        end.wait()
        return inside.shape

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    started.wait()
    try:
        assert "work() local `inside`" in holder("local `inside`", "thread", 8 * MIB).path
    finally:
        end.set()
        thread.join()


def check_a_closure_a_default_a_partial():
    def make():
        held = big()

        def inner():
            return held

        return inner

    globals()["closure"] = make()
    assert "closure `held`" in holder("__main__.closure", "closure", 8 * MIB).path
    del globals()["closure"]

    def function(argument=big()):
        return argument

    globals()["default"] = function
    del function
    assert "default of `argument`" in holder("__main__.default", "closure", 8 * MIB).path
    globals()["default"] = functools.partial(print, big())
    assert ".args[0]" in holder("__main__.default", "closure", 8 * MIB).path
    del globals()["default"]


def check_a_cache():
    @functools.lru_cache
    def load(mib):
        return big(mib)

    globals()["load"] = load
    load(8)
    holder("__main__.load", "cache", 8 * MIB)
    load.cache_clear()
    del globals()["load"]


def check_a_hook():
    model = nn.Linear(4, 4)
    kept = [big()]
    globals()["hooked"] = model
    model.register_forward_hook(functools.partial(lambda kept, *_: None, kept))
    del kept
    holder("__main__.hooked", "hook", 8 * MIB)
    del globals()["hooked"]


def check_a_class_attribute():
    Net.cache = big()
    assert holder("__main__.Net.cache", "class attribute", 8 * MIB).path == "__main__.Net.cache"
    del Net.cache


def check_a_weak_dictionary():
    class Key:
        pass

    globals()["key"], globals()["weak"] = Key(), weakref.WeakKeyDictionary()
    globals()["weak"][globals()["key"]] = big()
    holder("__main__.weak", None, 8 * MIB)
    del globals()["weak"], globals()["key"]


def check_slots_and_named_tuples():
    import collections

    class Slotted:
        __slots__ = ("field",)

    globals()["slotted"] = Slotted()
    globals()["slotted"].field = big()
    assert holder("__main__.slotted", "attribute", 8 * MIB).path == "__main__.slotted.field"
    globals()["slotted"] = collections.namedtuple("Pair", "left right")(None, big())
    assert holder("__main__.slotted", "attribute", 8 * MIB).path == "__main__.slotted.right"
    del globals()["slotted"]


def check_a_view_holds_its_base():
    globals()["view"] = big()[:16]
    assert holder("__main__.view", "global", 8 * MIB).n_storages == 1
    globals()["view"] = globals()["view"][:0]
    holder("__main__.view", "global", 8 * MIB)
    del globals()["view"]


def check_a_dead_cycle():
    class Cycle:
        pass

    gc.collect()
    gc.disable()
    try:
        cycle = Cycle()
        cycle.self, cycle.tensor = cycle, big()
        del cycle
        found = holder("dead cycle", "dead cycle", 8 * MIB)
        assert "Cycle" in found.path
        assert unhand.report().devices[0].garbage_bytes == 8 * MIB
    finally:
        gc.enable()
    gc.collect()


def check_native_owners():
    globals()["capsule"] = torch.utils.dlpack.to_dlpack(big())
    found = unhand.report().devices[0]
    assert found.unattributed_bytes >= 8 * MIB or any(holder.kind == "native" for holder in found.holders), found
    del globals()["capsule"]


def check_sparse_and_gradients_of_leaves():
    indices = torch.arange(MIB, device="cuda").expand(2, MIB)
    globals()["sparse"] = torch.sparse_coo_tensor(indices, torch.zeros(MIB, device="cuda"), (MIB, MIB))
    del indices
    assert holder("__main__.sparse").bytes >= 12 * MIB
    globals()["leaf"] = torch.zeros(MIB, device="cuda", requires_grad=True)
    globals()["leaf"].grad = torch.zeros(MIB, device="cuda")
    holder("__main__.leaf", "global", 4 * MIB)
    holder("__main__.leaf", "gradients", 4 * MIB)
    del globals()["sparse"], globals()["leaf"]


def check_saved_tensor_hooks_are_not_run():
    def pack(tensor):
        return ("packed", tensor)

    def unpack(packed):
        raise AssertionError("an unpack hook was run")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        globals()["packed"] = (torch.zeros(MIB, device="cuda", requires_grad=True) * 2).exp().sum()
    holder("__main__.packed", "autograd graph")
    del globals()["packed"]


def check_holders_of_an_object():
    globals()["first"] = big()
    globals()["second"] = {"key": [globals()["first"]]}
    found = unhand.holders(globals()["first"])
    assert [holder.path for holder in found] == ["__main__.first", "__main__.second['key'][0]"], found
    assert found.bytes == 8 * MIB and [holder.bytes for holder in found] == [0, 0]
    del globals()["second"]
    found = unhand.holders(globals()["first"])
    assert [holder.bytes for holder in found] == [8 * MIB], found
    del globals()["first"]


def check_the_graph_is_that_of_gc():
    """Differential: nodes and references as `gc.get_referents` tells them."""

    class Plain:
        def __init__(self):
            self.attribute, self.other = [1, 2], {"a": (3, [4])}

    things = [
        Plain(), [Plain()], (Plain(), "x"), {1: Plain()}, {Plain()}, frozenset([Plain()]), Plain, len, check_a_global,
        functools.partial(print, Plain()), (value for value in [Plain()]), sys, lambda: Plain(), Plain().__init__,
        weakref.ref(Plain), sys._getframe(), functools.lru_cache(lambda: 1), property(len), iter([Plain()]),
        type("Made", (), {"__slots__": ("slot",)})(), memoryview(b"x"), slice(Plain(), 1), range(3), super(Plain, Plain()),
    ]
    gc.collect()
    heap = _native.Heap()
    n_compared = 0
    for thing in things:
        node = heap.node(thing)
        assert (node is not None) == gc.is_tracked(thing), thing
        if node is None:
            continue
        ours = sorted(id(heap.object(referent)) for referent in heap.referents(node))
        theirs = sorted(id(referent) for referent in gc.get_referents(thing) if gc.is_tracked(referent))
        assert ours == theirs, f"{thing}: {len(ours)} references, {len(theirs)} with gc"
        n_compared += 1
    assert n_compared > 15
    del heap


def check_nothing_is_left_behind():
    model, things = Net().cuda(), [big(1) for _ in range(10)]
    loss = model(torch.randn(64, 256, device="cuda")).sum()
    watched = [StorageWeakRef(thing.untyped_storage()) for thing in [*things, *model.parameters(), loss]]
    state = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.memory_stats()
    unhand.report(), unhand.holders(model), unhand.holders(loss)
    gc.collect()
    before = [sys.getrefcount(thing) for thing in [*things, model, loss]]
    for _ in range(3):
        unhand.report(), unhand.holders(model), unhand.holders(loss)
    assert before == [sys.getrefcount(thing) for thing in [*things, model, loss]]
    assert state == (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    assert {key: value for key, value in torch.cuda.memory_stats().items() if "peak" in key} == {
        key: value for key, value in peak.items() if "peak" in key
    }
    del things, model, loss
    # No pass of the collector: what is left behind would have to be found by one.
    gc.disable()
    try:
        left = [not watch.expired() for watch in watched]
        assert not any(left[:10]), "a tensor survives its last reference"
    finally:
        gc.enable()
    gc.collect()
    assert all(watch.expired() for watch in watched), "something survives a pass of the collector"


def check_no_frame_is_pinned():
    def function():
        inside = big()
        watch = StorageWeakRef(inside.untyped_storage())
        unhand.report()
        return watch

    watch = function()
    assert watch.expired(), "the locals of a frame were kept"


def check_frozen_objects_are_seen():
    globals()["frozen"] = [big()]
    gc.freeze()
    try:
        holder("__main__.frozen", "container", 8 * MIB)
    finally:
        gc.unfreeze()
    del globals()["frozen"]


def check_every_answer_has_three_forms():
    globals()["planted"] = {"<b>": big()}
    report = unhand.report()
    import json

    json.dumps(report.to_dict()), json.dumps(unhand.holders(globals()["planted"]).to_dict())
    assert "&lt;b&gt;" in report._repr_html_() and "['<b>']" in str(report)
    del globals()["planted"]


def check_children_of_dead_frames_name_the_chain():
    def fails():
        inside = big()
        raise KeyError(inside.shape)

    try:
        try:
            fails()
        except KeyError as error:
            raise ValueError("again") from error
    except ValueError as error:
        globals()["kept"] = error
    found = holder("__main__.kept", "traceback", 8 * MIB)
    assert "local `inside`" in found.path and ("__cause__" in found.path or "__context__" in found.path), found.path
    del globals()["kept"]


if __name__ == "__main__":
    main(globals())
