"""What `unhand.report` says of memory that only native code has: DDP's buckets, a backward that runs, slices changed in place."""

import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main
from torch import distributed, nn

import unhand

MIB = 1 << 20


def look():
    """The report of the device, and the bytes of its holders by the words before the bracket in their paths."""
    device = unhand.report(limit=1000).devices[0]
    found = {}
    for holder in device.holders:
        name = holder.path.partition(" (")[0]
        found[name] = found.get(name, 0) + holder.bytes
    return device, found


def check_buckets():
    buckets = "gradient buckets of DistributedDataParallel"
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("nccl", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            # Three of 4 MiB and 4 KiB each.
            model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)]).cuda()
            before, _ = look()
            wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=4)
            device, found = look()
            n_parameter_bytes = sum(each.nbytes for each in model.parameters())
            assert found[buckets] == n_parameter_bytes, found
            assert device.unattributed_bytes == before.unattributed_bytes, device
            # The second pass rebuilds the buckets, the third one logs that.
            for _ in range(3):
                wrapped(torch.ones(8, 1024, device="cuda")).sum().backward()
            device, found = look()
            # In PyTorch 2.11 something of c10d's keeps the first buckets too: they stay without a name.
            assert found[buckets] == n_parameter_bytes, found
            # Blocks like them that something else keeps are not taken for buckets.
            others = torch.empty(n_parameter_bytes // 3, dtype=torch.uint8, device="cuda")
            assert look()[1][buckets] == n_parameter_bytes
            del wrapped, others
        finally:
            distributed.destroy_process_group()
    assert buckets not in look()[1]


def check_gradients_on_their_way():
    """The gradient of the second use of a weight waits in the engine for that of the first."""
    engine = "a backward that is running"
    weight = torch.zeros(1536, 1024, device="cuda", requires_grad=True)
    reports = []
    before, _ = look()
    first = torch.zeros(8, 1536, device="cuda", requires_grad=True)
    middle = first @ weight
    middle.register_hook(lambda gradient: reports.append(look()))
    # Without a hook of its own the product's gradient of `weight` has no Python object.
    loss = (middle @ weight.t()).sum()
    loss.backward()
    [(device, found)] = reports
    assert found[engine] >= 6 * MIB, found
    assert device.unattributed_bytes == before.unattributed_bytes, device
    del loss, middle
    assert engine not in look()[1], "nothing is on its way when no backward runs"


def check_what_a_slice_saved():
    x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    y = x * 1
    before, _ = look()
    # The product saves a copy of the slice, which has no Python object.
    y[:768].mul_(torch.sin(x[:768]))
    device, _ = look()
    hidden = device.unattributed_bytes - before.unattributed_bytes
    # Only new releases show the node under CopySlices.
    assert hidden == (0 if hasattr(y.grad_fn, "_wrapped_node") else 3 * MIB), hidden


if __name__ == "__main__":
    main(globals())
