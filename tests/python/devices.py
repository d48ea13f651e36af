"""What `unhand._native.devices` says where there is no GPU; with one, `tests/python/torch/devices.py` looks closer."""

import json
import os

from bench import main, raises
from unhand import _native


def check_either_there_are_devices_or_a_reason():
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
        assert isinstance(json.loads(_native.devices())["devices"], list)
        return
    text = raises(RuntimeError, _native.devices, "NVIDIA driver")
    assert text.count("\n  caused by: ") == 1 and "\n\nhint: " in text, text


if __name__ == "__main__":
    main(globals())
