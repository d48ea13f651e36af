"""How a ladder is put together and shown as text, where a device or NVML would be needed: from given figures. Needs no torch."""

import dataclasses
import json
import os
import sys
import types

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main

from unhand import _native, _ladder as ladder

GIB = 1 << 30

EXAMPLE = ladder.Ladder(
    device=0,
    name="NVIDIA H200",
    uuid="GPU-1",
    total_bytes=int(139.7 * GIB),
    device_used_bytes=int(43.5 * GIB),
    device_free_bytes=int(96.2 * GIB),
    used_bytes=int(41.4 * GIB),
    used_how=ladder.EXACT,
    used_at_most_bytes=None,
    others_bytes=int(2.1 * GIB),
    outside_bytes=int(0.6 * GIB),
    outside=(ladder.Outside("context, kernels, libraries", int(0.6 * GIB), ""), ladder.Outside("cupy", None, "")),
    reserved_bytes=int(40.8 * GIB),
    allocated_bytes=int(12.3 * GIB),
    requested_bytes=int(12.2 * GIB),
    active_bytes=int(12.5 * GIB),
    workspaces_bytes=32 << 20,
    cached_bytes=int(28.5 * GIB),
    returnable_bytes=int(26.9 * GIB),
    stuck_bytes=int(0.6 * GIB),
    kept_by_pools_bytes=1 * GIB,
    pools=(
        ladder.Pool((0, 0), "default", 39 * GIB, 12 * GIB, None),
        ladder.Pool((1, 0), "graph", GIB, 0, "2 CUDA graphs"),
    ),
    pinned_host_reserved_bytes=1 * GIB,
    pinned_host_allocated_bytes=int(0.2 * GIB),
    limit_bytes=100 * GIB,
    settings="",
)

UNKNOWN = dataclasses.replace(
    EXAMPLE,
    used_bytes=None,
    used_how="no NVML: not loaded",
    used_at_most_bytes=int(43.5 * GIB),
    others_bytes=None,
    outside_bytes=None,
    outside=(),
    workspaces_bytes=None,
    cached_bytes=None,
    returnable_bytes=None,
    stuck_bytes=None,
    kept_by_pools_bytes=None,
    pools=(),
    pinned_host_reserved_bytes=None,
    limit_bytes=None,
    requested_bytes=None,
    active_bytes=None,
)


def check_the_table():
    assert str(EXAMPLE) == (
        "cuda:0  NVIDIA H200, 139.7 GiB\n"
        "  driver: used on the device   43.5 GiB   of 139.7 GiB\n"
        "    other processes             2.1 GiB\n"
        "    this process               41.4 GiB\n"
        "      outside PyTorch         614.4 MiB   context, kernels, libraries, cupy\n"
        "      reserved by PyTorch      40.8 GiB   limited to 100.0 GiB\n"
        "        allocated              12.3 GiB   12.2 GiB requested\n"
        "          cuBLAS workspaces    32.0 MiB   no tensor's; made anew when needed\n"
        "        cached                 28.5 GiB   204.8 MiB of it freed, in use by another stream\n"
        "          returnable           26.9 GiB   torch.cuda.empty_cache() gives it back\n"
        "          stuck               614.4 MiB   beside live blocks in their segments\n"
        "          kept by pools         1.0 GiB   free, until the pool's owner is gone: 2 CUDA graphs\n"
        "  pinned host memory            1.0 GiB   host RAM, 204.8 MiB in use"
    ), str(EXAMPLE)


def check_what_is_not_known_is_said():
    assert str(UNKNOWN) == (
        "cuda:0  NVIDIA H200, 139.7 GiB\n"
        "  driver: used on the device  43.5 GiB   of 139.7 GiB\n"
        "    this process                   n/a   no NVML: not loaded; at most 43.5 GiB\n"
        "      reserved by PyTorch     40.8 GiB\n"
        "        allocated             12.3 GiB\n"
        "        cached                     n/a"
    ), str(UNKNOWN)
    assert UNKNOWN.to_dict()["used_bytes"] is None


def check_json_has_the_names_of_the_fields():
    data = json.loads(json.dumps(EXAMPLE.to_dict()))
    assert list(data) == [field.name for field in dataclasses.fields(ladder.Ladder)]
    assert data["pools"][1] == {
        "id": [1, 0],
        "kind": "graph",
        "reserved_bytes": GIB,
        "allocated_bytes": 0,
        "owner": "2 CUDA graphs",
    }


def check_shares_of_processes():
    me = os.getpid()

    def shares(processes, reserved=5, has_context=True, why=None):
        nvml = None if processes is None else {"processes": processes}
        return ladder._shares(nvml, why, has_context, reserved)

    def process(pid, used_bytes):
        return {"pid": pid, "used_bytes": used_bytes}

    assert shares([process(me, 7), process(me + 1, 3), process(me + 2, 1)]) == (7, ladder.EXACT, 4)
    # A size that NVML does not tell (Windows) is not zero.
    assert shares([process(me, 7), process(me + 1, None)]) == (7, ladder.EXACT, None)
    assert shares([process(me, None)])[:1] == (None,)
    # In a container: one of them is this process, under another number.
    used, how, others = shares([process(71001, 6), process(71002, 2)])
    assert (used, others) == (6, 2) and how.startswith("inferred")
    assert shares([process(71001, 6), process(71002, 7)])[0] is None
    assert shares([process(71001, 6), process(71002, None)])[0] is None
    assert shares([])[:1] == (None,) and "container" in shares([])[1]
    assert shares(None, why="no NVML: gone") == (None, "no NVML: gone", None)
    assert shares(None, has_context=False) == (0, "no context on this device", None)
    assert shares([process(71001, 6)], has_context=False) == (0, "no context on this device", 6)


def check_devices_are_matched_by_uuid():
    real = ladder._native
    devices = [{"index": 0, "uuid": "GPU-BB-1"}, {"index": 1, "uuid": "GPU-aa-1"}, {"index": 2, "uuid": "MIG-cc-1"}]
    answer = {"devices": devices}

    def broken():
        raise OSError("libnvidia-ml.so.1 is not there")

    try:
        ladder._native = types.SimpleNamespace(devices=lambda: json.dumps(answer))
        assert ladder._nvml("GPU-aa-1")[0]["index"] == 1 and ladder._nvml("GPU-bb-1")[0]["index"] == 0
        assert ladder._nvml("GPU-cc-1")[0]["index"] == 2
        assert ladder._nvml("GPU-dd-1")[0] is None and "MIG" in ladder._nvml("GPU-dd-1")[1]
        assert ladder._nvml(None)[0] is None
        ladder._native = types.SimpleNamespace(devices=broken)
        assert ladder._nvml("GPU-aa-1") == (None, "no NVML: libnvidia-ml.so.1 is not there")
        ladder._native = types.SimpleNamespace()
        assert ladder._nvml("GPU-aa-1") == (None, "NVML was not asked")
    finally:
        ladder._native = real


def check_the_native_module_answers():
    import pickle

    def block(address, size, state):
        return {"address": address, "size": size, "requested_size": size, "state": state}

    segment = {
        "device": 1,
        "address": 1 << 30,
        "total_size": 4 << 20,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [block(1 << 30, 1 << 20, "active_allocated"), block((1 << 30) + (1 << 20), 3 << 20, "inactive")],
    }
    look = {"segments": [segment], "device_traces": [], "allocator_settings": {}}
    (answer,) = json.loads(_native.cache(pickle.dumps(look, protocol=4)))["devices"]
    assert answer["device"] == 1 and answer["cache"]["stuck_bytes"] == 3 << 20
    assert answer["cache"]["stuck"][0]["pins"][0]["block_bytes"] == 1 << 20
    try:
        _native.cache(b"\x80\x04cos\nsystem\n.")
    except ValueError as error:
        assert "asks for code to be run" in str(error)
    else:
        raise AssertionError("a pickle that calls something was accepted")
    assert _native.is_cublas_workspace(33_554_432) and not _native.is_cublas_workspace(1 << 20)


if __name__ == "__main__":
    main(globals())
