"""The driver's view of the devices, without PyTorch and beside it: same devices, same memory, no context made."""

import json
import os

import torch
from bench import main
from unhand import _native

GIB = 1 << 30


def sample():
    return json.loads(_native.devices())


def check_looking_makes_no_context():
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: None)
    before = has_context(0)
    assert sample()["devices"]
    assert not torch.cuda.is_initialized() and has_context(0) == before


def check_versions_are_there():
    found = sample()
    assert found["driver_version"] and found["cuda_driver_version"].count(".") == 1, found


def check_the_devices_are_pytorch_s():
    found = sample()
    assert len(found["devices"]) == torch.cuda.device_count() and found["unreadable"] == []
    for device in found["devices"]:
        properties = torch.cuda.get_device_properties(device["index"])
        assert device["uuid"] == f"GPU-{properties.uuid}", (device, properties)
        assert device["name"] == properties.name


def check_memory_is_what_the_driver_gives():
    before = sample()["devices"][0]
    block = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    after = sample()["devices"][0]
    assert after["used_bytes"] - before["used_bytes"] >= 3 * GIB
    free, total = torch.cuda.mem_get_info(0)
    # What the driver keeps for itself is no part of CUDA's total.
    assert (after["free_bytes"], after["total_bytes"] - after["reserved_bytes"]) == (free, total)
    del block
    torch.cuda.empty_cache()


def check_this_process_is_listed():
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    found = sample()
    own = [process for process in found["devices"][0]["processes"] if process["pid"] == os.getpid()]
    assert len(own) == 1 and own[0]["used_bytes"] >= GIB and own[0]["kind"] == "compute", own
    assert found["has_foreign_pids"] is False
    del block


def check_what_the_driver_does_not_say_is_null():
    device = sample()["devices"][0]
    # The stand-in does not know the function at all; a GPU that can be divided says whether it is.
    assert device["mig"] in (None, {"is_enabled": False, "devices": []}), device["mig"]


if __name__ == "__main__":
    main(globals())
