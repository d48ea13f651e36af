"""Devices, memory, copies, and what the allocator records: what PyTorch shows must be what a device would show."""

import ctypes
import gc

import torch
from bench import main, raises

MIB = 1 << 20


def released():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def check_there_is_a_device_and_it_says_that_it_is_none():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    properties = torch.cuda.get_device_properties(0)
    assert properties.name == "NVIDIA H200 (unhand stand-in)", properties.name
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    assert properties.total_memory == 150_109_880_320, properties.total_memory
    assert properties.L2_cache_size == 62_914_560 and properties.max_threads_per_multi_processor == 2048
    assert properties.regs_per_multiprocessor == 65_536 and properties.warp_size == 32
    assert torch.cuda.get_device_capability() == (9, 0)


def check_memory_information_agrees_with_what_is_allocated():
    released()
    before, total = torch.cuda.mem_get_info()
    assert total - before == 552_402_944 + torch.cuda.memory_reserved()
    block = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert before - torch.cuda.mem_get_info()[0] == 100 * MIB
    del block
    assert before - torch.cuda.mem_get_info()[0] == 100 * MIB
    released()
    assert torch.cuda.mem_get_info()[0] == before


def check_copies_are_real():
    source = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    there = source.cuda()
    assert torch.equal(there.cpu(), source)
    assert torch.equal(there.t().cpu(), source.t())
    assert torch.equal(there[1:, 2:].cpu(), source[1:, 2:])
    assert torch.equal(there.clone().cpu(), source)
    pinned = source.pin_memory()
    assert pinned.is_pinned() and not source.is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), source)
    big = torch.randn(3_000_001)
    assert torch.equal(big.cuda().cpu(), big)


def check_saving_and_loading_keeps_values():
    import io

    file = io.BytesIO()
    source = torch.randn(1000)
    torch.save(source.cuda(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.is_cuda and torch.equal(loaded.cpu(), source)


def check_zeroed_memory_is_zero():
    for count in (7, 1000, 1 << 20):
        block = torch.empty(count, dtype=torch.uint8, device="cuda")
        block.copy_(torch.full((count,), 5, dtype=torch.uint8))
        assert int(block.cpu().sum()) == 5 * count
        block.zero_()
        assert int(block.cpu().sum()) == 0, count


def check_counters():
    released()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    stats = torch.cuda.memory_stats()
    assert stats["requested_bytes.all.current"] > 0 and stats["num_ooms"] == 0
    del block
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 4096


def check_history_has_frames_and_every_kind_of_event():
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="all")
    block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    trace = snapshot["device_traces"][0]
    actions = {event["action"] for event in trace}
    assert {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"} <= actions, actions
    frames = [frame for event in trace for frame in event["frames"]]
    assert any(frame["filename"].endswith("memory.py") for frame in frames)
    assert any("torch" in frame["name"] or "at::" in frame["name"] for frame in frames)


def check_out_of_memory_says_what_it_usually_says():
    released()
    text = raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(200 << 30, dtype=torch.uint8, device="cuda"))
    assert "Tried to allocate 200.00 GiB. GPU 0 has a total capacity of 139.80 GiB" in text, text
    assert "this process has" in text and "memory in use" in text, text
    assert torch.cuda.memory_stats()["num_ooms"] >= 1
    torch.empty(1000, device="cuda")


def check_memory_can_be_filled_to_the_last_unit():
    released()
    free, _ = torch.cuda.mem_get_info()
    keep = [torch.empty(free // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda")]
    assert torch.cuda.mem_get_info()[0] < 2 * MIB
    raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
    keep.clear()
    released()


def check_a_fraction_limits():
    released()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1 * 2**30 / total)
    try:
        raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(2 << 30, dtype=torch.uint8, device="cuda"), "1024.00 MiB allowed")
        torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        released()


def check_a_retry_frees_the_cache_first():
    released()
    free, total = torch.cuda.mem_get_info()
    half = free // 2 // MIB * MIB + 100 * MIB
    block = torch.empty(half, dtype=torch.uint8, device="cuda")
    del block
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    block = torch.empty(half + 20 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] == before + 1
    del block
    released()


def check_pointers_are_known_by_what_they_are():
    runtime = ctypes.CDLL(None)

    class Attributes(ctypes.Structure):
        _fields_ = [("kind", ctypes.c_int), ("device", ctypes.c_int), ("on_device", ctypes.c_void_p),
                    ("on_host", ctypes.c_void_p), ("reserved", ctypes.c_long * 8)]

    def kind(pointer):
        attributes = Attributes()
        assert runtime.cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(pointer)) == 0
        return attributes.kind

    there, here = torch.empty(10, device="cuda"), torch.empty(10)
    pinned = torch.empty(10, pin_memory=True)
    assert [kind(tensor.data_ptr()) for tensor in (there, here, pinned)] == [2, 0, 1]
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert runtime.cuMemGetAddressRange_v2(ctypes.byref(address), ctypes.byref(size), ctypes.c_void_p(there.data_ptr())) == 0
    assert size.value % (2 * MIB) == 0 and address.value <= there.data_ptr()


def check_copies_of_memory_that_is_gone_fail():
    runtime = ctypes.CDLL(None)
    pointer, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(16)
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(16)) == 0
    assert runtime.cudaMemcpy(buffer, pointer, ctypes.c_size_t(16), 2) == 0
    assert runtime.cudaFree(pointer) == 0
    assert runtime.cudaMemcpy(buffer, pointer, ctypes.c_size_t(16), 2) == 1
    assert runtime.cudaGetLastError() == 1 and runtime.cudaGetLastError() == 0
    assert runtime.cudaFree(pointer) == 1 and runtime.cudaGetLastError() == 1


def check_physical_memory_shows_the_same_bytes_wherever_it_is_mapped():
    driver = ctypes.CDLL(None)

    class Properties(ctypes.Structure):
        _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                    ("device", ctypes.c_int), ("unused", ctypes.c_void_p), ("flags", ctypes.c_uint64)]

    class Access(ctypes.Structure):
        _fields_ = [("where", ctypes.c_int), ("device", ctypes.c_int), ("access", ctypes.c_int)]

    size = ctypes.c_size_t(2 * MIB)
    handle, places = ctypes.c_uint64(), [ctypes.c_uint64(), ctypes.c_uint64()]
    free = torch.cuda.mem_get_info()[0]
    assert driver.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(Properties(1, 0, 1, 0)), ctypes.c_uint64()) == 0
    zero = ctypes.c_size_t()
    for place in places:
        assert driver.cuMemAddressReserve(ctypes.byref(place), size, zero, ctypes.c_uint64(), ctypes.c_uint64()) == 0
        assert driver.cuMemMap(place, size, zero, handle, ctypes.c_uint64()) == 0
        assert driver.cuMemSetAccess(place, size, ctypes.byref(Access(1, 0, 3)), ctypes.c_size_t(1)) == 0
    assert driver.cuMemRelease(handle) == 0
    assert free - torch.cuda.mem_get_info()[0] == 2 * MIB
    text = ctypes.create_string_buffer(b"same bytes", 16)
    assert driver.cudaMemcpy(ctypes.c_void_p(places[0].value), text, ctypes.c_size_t(16), 1) == 0
    found = ctypes.create_string_buffer(16)
    assert driver.cudaMemcpy(found, ctypes.c_void_p(places[1].value), ctypes.c_size_t(16), 2) == 0
    assert found.value == b"same bytes"
    for place in places:
        assert driver.cuMemUnmap(place, size) == 0 and driver.cuMemAddressFree(place, size) == 0
    assert torch.cuda.mem_get_info()[0] == free


def check_the_management_library_tells_the_same():
    management = ctypes.CDLL("libnvidia-ml.so.1")
    assert management.nvmlInit_v2() == 0
    device = ctypes.c_void_p()
    assert management.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    memory = (ctypes.c_uint64 * 3)()
    assert management.nvmlDeviceGetMemoryInfo(device, memory) == 0
    free, total = torch.cuda.mem_get_info()
    assert list(memory) == [total, free, total - free]
    name = ctypes.create_string_buffer(96)
    assert management.nvmlDeviceGetName(device, name, 96) == 0
    assert name.value.decode() == torch.cuda.get_device_name()


def check_children_run_as_always():
    import os
    import subprocess

    assert subprocess.run(["/bin/echo", "fine"], capture_output=True, text=True, check=True).stdout == "fine\n"
    # One that wants no part in it can leave the preload out.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(["/bin/true"], check=True, env=environment)


def check_loaders_with_workers_feed_pinned_batches():
    from torch.utils.data import DataLoader, TensorDataset

    numbers = TensorDataset(torch.arange(64.0).reshape(64, 1))
    total = 0.0
    for (batch,) in DataLoader(numbers, batch_size=8, num_workers=2, pin_memory=True):
        assert batch.is_pinned()
        total += batch.cuda(non_blocking=True).cpu().sum().item()
    assert total == 2016.0


if __name__ == "__main__":
    main(globals())
