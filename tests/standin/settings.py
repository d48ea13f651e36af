"""The allocator's settings: run once with each, by way of PYTORCH_CUDA_ALLOC_CONF."""

import gc
import os

import torch
from bench import main, raises

MIB = 1 << 20
SETTINGS = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def released():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def check_memory_comes_back():
    released()
    before = torch.cuda.mem_get_info()[0]
    blocks = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 5, 15, 33, 70)]
    for index, block in enumerate(blocks):
        block.copy_(torch.full_like(block, index + 1, device="cpu"))
    assert [int(block[-1].cpu()) for block in blocks] == [1, 2, 3, 4, 5]
    del blocks, block
    released()
    assert torch.cuda.mem_get_info()[0] == before


def check_segments_are_what_the_settings_say():
    if "cudaMallocAsync" in SETTINGS:
        assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        return
    released()
    block = torch.empty(33 * MIB, dtype=torch.uint8, device="cuda")
    [segment] = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] <= block.data_ptr() < segment["address"] + segment["total_size"]]
    is_expandable = "expandable_segments:True" in SETTINGS
    assert segment["is_expandable"] == is_expandable
    # Pages of 20 MiB, or the request in units of 2 MiB; a quarter of a power of two is 40 MiB.
    size = 40 if is_expandable or "roundup" in SETTINGS else 34
    assert segment["total_size"] == size * MIB, segment["total_size"]
    del block
    released()


def check_out_of_memory_is_survived():
    released()
    raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(200 << 30, dtype=torch.uint8, device="cuda"))
    keep = [torch.empty(10 << 30, dtype=torch.uint8, device="cuda") for _ in range(13)]
    raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(20 << 30, dtype=torch.uint8, device="cuda"))
    del keep[::2]
    keep.append(torch.empty(40 << 30, dtype=torch.uint8, device="cuda"))
    keep.clear()
    released()


def check_a_training_step():
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for size in (8, 64, 32):
        model(torch.randn(size, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(globals())
