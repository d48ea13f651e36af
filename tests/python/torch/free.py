"""What `unhand.free` gives back, what it leaves alone, and that a freed tensor raises and never breaks the context."""

import copy
import functools
import gc
import os
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main, raises
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import unhand

MIB = 1 << 20


def big(mib=8, **options):
    return torch.zeros(mib * MIB // 4, device="cuda", **options)


class Net(nn.Module):
    def __init__(self, width=512, depth=3):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        return self.layers(x).tanh()


def trained(width=512):
    model = Net(width).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(1024, width, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    return model, optimizer, loss


def allocated():
    return torch.cuda.memory_allocated()


def nothing_left():
    """What is allocated when everything of a check is gone."""
    unhand.free()
    return allocated()


def check_a_tensor_that_has_two_names():
    floor = nothing_left()
    one = two = big()
    freed = unhand.free(one)
    assert allocated() == floor and freed.freed_bytes == 8 * MIB and freed.n_storages == 1, freed
    assert two.shape == (2 * MIB,) and two.dtype == torch.float32 and "freed Tensor" in repr(two)
    assert isinstance(two, torch.Tensor)


def check_each_use_of_a_freed_tensor_raises():
    tensor = big(requires_grad=True)
    alias = tensor.detach()
    product = (tensor * 2).exp()
    kept = product.detach()
    unhand.free(tensor, product, kept, alias, shared=True)
    uses = {
        "add": lambda t: t + 1, "sum": lambda t: t.sum(), "mm": lambda t: t.view(2, -1) @ t.view(-1, 2),
        "cpu": lambda t: t.cpu(), "to": lambda t: t.to("cpu"), "item": lambda t: t[0].item(), "tolist": lambda t: t.tolist(),
        "in place": lambda t: t.detach().zero_(), "copy": lambda t: torch.empty_like(t.cpu()).copy_(t), "clone": lambda t: t.clone(),
        "pointer": lambda t: t.data_ptr(), "foreach": lambda t: torch._foreach_add([t], [t]),
        "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t), "linear": lambda t: nn.functional.linear(t, t),
        "deepcopy": lambda t: copy.deepcopy(t), "numpy": lambda t: t.cpu().numpy(), "item of view": lambda t: t[:1].item(),
    }
    for tensor in (tensor, alias, product, kept):
        for name, use in uses.items():
            raises(RuntimeError, lambda: use(tensor), "unhand")
    assert torch.ones(4, device="cuda").add(1).cpu().tolist() == [2.0] * 4, "the device works on"


def check_the_error_is_ours():
    tensor = big()
    unhand.free(tensor)
    text = raises(unhand.FreedError, lambda: tensor + 1, "given back by unhand.free")
    assert "shape (2097152,)" in text, text


def check_a_freed_tensor_takes_new_data():
    parameter = nn.Parameter(big())
    unhand.free(parameter)
    assert isinstance(parameter, nn.Parameter)
    parameter.data = torch.ones(4, device="cuda")
    assert type(parameter) is nn.Parameter and parameter.detach().cpu().tolist() == [1.0] * 4


def check_a_model_and_its_optimizer():
    floor = nothing_left()
    model, optimizer, loss = trained()
    freed = unhand.free(model, optimizer)
    assert allocated() - floor < MIB, f"{allocated() - floor} left:\n{freed}"
    raises(unhand.FreedError, lambda: model(torch.randn(2, 512, device="cuda")), "unhand.free")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert loss is not None


def check_a_model_whose_optimizer_is_forgotten():
    floor = nothing_left()
    model, optimizer, _ = trained()
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    freed = unhand.free(model)
    left = allocated() - floor
    assert n_bytes * 2 <= left < n_bytes * 2 + MIB, left
    state = max(freed.kept, key=lambda holder: holder.bytes)
    assert state.kind == "optimizer state" and "local `optimizer`" in state.path, freed
    del optimizer


def check_an_optimizer_leaves_its_model():
    model, optimizer, _ = trained()
    unhand.free()
    before = allocated()
    freed = unhand.free(optimizer)
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert 2 * n_bytes <= before - allocated() < 3 * n_bytes, freed
    assert model(torch.randn(2, 512, device="cuda")).shape == (2, 512)


def check_tensors_that_an_optimizer_has_and_the_user_too():
    leaf = big(requires_grad=True)
    optimizer = torch.optim.Adam([leaf])
    leaf.sum().backward()
    optimizer.step()
    unhand.free(optimizer)
    leaf.detach().add_(1)


def check_saved_tensors_and_graphs():
    floor = nothing_left()
    model = Net().cuda()
    losses = [model(torch.randn(1024, 512, device="cuda")).sum() for _ in range(3)]
    unhand.free(losses, model)
    assert allocated() - floor < MIB
    raises(RuntimeError, lambda: losses[0].backward())


def check_a_view_elsewhere_is_left_alone():
    whole = big()
    part = whole[:16]
    freed = unhand.free(whole)
    assert freed.n_storages == 0 and freed.shared and freed.shared[0].bytes == 8 * MIB, freed
    assert "local `part`" in freed.shared[0].path, freed.shared
    part.add_(1)
    freed = unhand.free(whole, shared=True)
    assert freed.n_storages == 1
    raises(RuntimeError, lambda: part.add_(1), "unhand")


def check_a_view_whose_base_is_gone():
    floor = nothing_left()
    part = big()[:16]
    unhand.free(part)
    assert allocated() == floor


def check_tied_weights_of_another_model():
    one, two = nn.Linear(1024, 1024).cuda(), nn.Linear(1024, 1024).cuda()
    two.weight = one.weight
    freed = unhand.free(one)
    assert freed.n_storages == 1 and freed.shared[0].bytes == 4 * MIB, freed
    assert "local `two`" in freed.shared[0].path
    assert two(torch.randn(2, 1024, device="cuda")).shape == (2, 1024)


def check_wrappers_and_trainers_do_not_stand_in_the_way():
    class Trainer:
        def __init__(self, model):
            self.model, self.wrapped = model, nn.Sequential(model)
            self.other = big()
            model.trainer = self

    floor = nothing_left()
    model = Net().cuda()
    trainer = Trainer(model)
    unhand.free(model)
    left = allocated() - floor
    assert left == 8 * MIB, left
    trainer.other.add_(1)
    unhand.free(trainer)
    assert allocated() == floor


def check_containers_and_objects():
    class Cache:
        __slots__ = ("keys", "values")

    cache = Cache()
    cache.keys, cache.values = [big(1) for _ in range(4)], {"a": (big(1), {"b": big(1)})}
    floor = allocated() - 6 * MIB
    unhand.free(cache)
    assert allocated() == floor


def check_a_graph_is_dropped_from_a_view():
    floor = nothing_left()
    source = big(requires_grad=True)
    out = (source * 2).exp()[1:]
    unhand.free(out)
    assert allocated() - floor == 8 * MIB, (allocated() - floor, out.grad_fn)
    assert source.detach().sum().item() == 0


def check_nothing_named_frees_what_nobody_meant_to_keep():
    floor = nothing_left()

    class Cycle:
        pass

    def fails():
        inside = big()
        raise ValueError(inside.shape)

    try:
        fails()
    except ValueError as error:
        sys.last_value = error
    gc.disable()
    try:
        cycle = Cycle()
        cycle.self, cycle.tensor = cycle, big()
        del cycle
        kept = big()
        freed = unhand.free()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert allocated() - floor == 8 * MIB, freed
    kept.add_(1)
    if hasattr(sys, "last_value"):
        del sys.last_value


def check_frozen_cycles():
    class Cycle:
        pass

    floor = nothing_left()
    cycle = Cycle()
    cycle.self, cycle.tensor = cycle, big()
    gc.freeze()
    del cycle
    try:
        unhand.free()
        assert allocated() == floor and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def check_a_dry_run_does_nothing():
    model, optimizer, _ = trained()
    before = allocated()
    told = unhand.free(model, optimizer, dry_run=True)
    assert allocated() == before and told.dry_run and told.freed_bytes > 0
    model(torch.randn(2, 512, device="cuda"))
    done = unhand.free(model, optimizer)
    assert done.n_storages == told.n_storages
    assert "would free" in str(told)


def check_twice_is_once():
    tensor = big()
    assert unhand.free(tensor).n_storages == 1
    again = unhand.free(tensor)
    assert again.n_storages == 0 and again.freed_bytes == 0


def check_what_cannot_be_freed_is_said():
    text = raises(TypeError, lambda: unhand.free(3), "cannot free a int")
    assert "name a tensor" in text
    assert unhand.free(None).n_storages == 0


def check_it_is_refused_during_a_capture():
    tensor = big()
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(16, device="cuda")
    with torch.cuda.graph(graph):
        out = static + 1
        raises(unhand.CaptureError, lambda: unhand.free(tensor), "captured")
    graph.replay()
    assert out.shape == (16,)
    tensor.add_(1)
    freed = unhand.free(static)
    assert freed.n_storages == 0 and freed.shared, "a graph may replay over it"
    assert "graph" in freed.shared[0].advice, freed.shared
    freed = unhand.free(static, graph, out)
    assert freed.n_storages == 2, freed


class Foreign:
    """An array of another library over memory of PyTorch's."""

    def __init__(self, tensor):
        self.pointer, self.things = tensor.data_ptr(), []

    @property
    def __cuda_array_interface__(self):
        return {"shape": (1,), "typestr": "<f4", "data": (self.pointer, False), "version": 3}


def check_arrays_of_other_libraries_are_left_alone():
    tensor = big()
    foreign = Foreign(tensor)
    freed = unhand.free(tensor)
    assert freed.n_storages == 0 and "another library" in freed.shared[0].advice, freed
    assert "local `foreign`" in freed.shared[0].path
    del foreign
    assert unhand.free(tensor).n_storages == 1


def check_tensors_that_came_through_dlpack_are_left_alone():
    tensor = big()
    other = torch.from_dlpack(tensor)
    freed = unhand.free(tensor)
    assert freed.n_storages == 0 and "local `other`" in freed.shared[0].path, freed
    other.add_(1)
    unhand.free(tensor, shared=True)
    raises(RuntimeError, lambda: other.add_(1), "unhand")
    torch.zeros(4, device="cuda").add_(1)


def check_looking_changes_nothing_of_what_is_freed():
    def outcome(look):
        model = Net().cuda()
        loss = model(torch.randn(1024, 512, device="cuda")).sum()
        if look:
            unhand.report()
            unhand.free(model, dry_run=True)
        freed = unhand.free(model)
        assert loss is not None
        return freed.n_storages, len(freed.shared)

    assert outcome(False) == outcome(True) == (6, 0), (outcome(False), outcome(True))


def check_keys_of_the_state_are_not_freed():
    leaf = big(requires_grad=True)
    optimizer = torch.optim.Adam([leaf])
    leaf.sum().backward()
    optimizer.step()
    unhand.free(optimizer.state)
    leaf.detach().add_(1)
    leaf.grad.add_(1)


def check_other_threads_go_on():
    stop, errors = threading.Event(), []

    def work():
        mine = torch.zeros(1024, device="cuda")
        while not stop.is_set():
            try:
                mine = mine + 1
                mine.cpu()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            unhand.free(big(), big(1))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors[:1]


def check_several_free_at_once():
    results, floor = [], nothing_left()

    def work():
        results.append(unhand.free(big(4)).n_storages)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 4 and allocated() == floor


def check_the_driver_gets_it_back():
    nothing_left()
    free_before = torch.cuda.mem_get_info()[0]
    things = [big(64) for _ in range(4)]
    freed = unhand.free(things)
    assert freed.returned_bytes == 256 * MIB, freed
    assert torch.cuda.mem_get_info()[0] == free_before
    assert "returned 256.0 MiB to the driver" in str(freed)


def check_partials_and_functions_as_targets():
    floor = nothing_left()
    held = functools.partial(print, big())
    unhand.free(held)
    assert allocated() == floor


def check_sparse_tensors():
    floor = nothing_left()
    indices = torch.zeros(2, MIB, dtype=torch.int64, device="cuda")
    sparse = torch.sparse_coo_tensor(indices, big(4), (MIB, MIB), check_invariants=False)
    del indices
    unhand.free(sparse, shared=True)
    assert allocated() == floor, allocated() - floor


def check_answers_have_three_forms():
    import json

    tensor, kept = big(), big()
    part = kept[:4]
    freed = unhand.free(tensor, kept)
    json.dumps(freed.to_dict())
    assert "not touched" in str(freed) and "<table" in freed._repr_html_()
    assert part is not None


def check_storages_are_gone():
    model, optimizer, loss = trained()
    watched = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    unhand.free(model, optimizer, loss)
    del model, optimizer, loss
    gc.collect()
    assert all(watch.expired() for watch in watched)


if __name__ == "__main__":
    main(globals())
