"""Several devices, and one of another kind: run with UNHAND_STANDIN_DEVICES=2 and UNHAND_STANDIN_GPU=t4."""

import os

import torch
from bench import main, raises


def check_there_are_as_many_as_asked_for():
    assert torch.cuda.device_count() == int(os.environ["UNHAND_STANDIN_DEVICES"]) == 2
    names = {torch.cuda.get_device_name(index) for index in range(2)}
    assert names == {"Tesla T4 (unhand stand-in)"}, names
    assert torch.cuda.get_device_capability(1) == (7, 5)
    assert len({str(torch.cuda.get_device_properties(index).uuid) for index in range(2)}) == 2


def check_each_has_memory_of_its_own():
    size = 9 << 30
    first = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    second = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(size, dtype=torch.uint8, device="cuda:1"), "GPU 1")
    assert torch.cuda.mem_get_info(0)[0] == torch.cuda.mem_get_info(1)[0] < 6 << 30
    del first, second
    torch.cuda.empty_cache()


def check_copies_between_devices():
    source = torch.randn(1000)
    first = source.to("cuda:0")
    second = first.to("cuda:1")
    assert second.device.index == 1 and torch.equal(second.cpu(), source)
    assert torch.cuda.can_device_access_peer(0, 1)


def check_streams_belong_to_devices():
    with torch.cuda.device(1):
        assert torch.cuda.current_stream().device.index == 1
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.empty(10, device="cuda").zero_()
    stream.synchronize()
    raises(RuntimeError, lambda: torch.empty(1, device="cuda:2"), "invalid device ordinal")


if __name__ == "__main__":
    main(globals())
