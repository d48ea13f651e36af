"""The package beside the real PyTorch: importing one does not import the other, and both work."""

import sys

import unhand
from bench import main

IS_TORCH_THERE = "torch" in sys.modules


def check_the_package_does_not_import_pytorch():
    assert unhand.__doc__ and not IS_TORCH_THERE


def check_the_module_and_pytorch_share_a_process():
    import torch
    from unhand import _native

    tensor = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert _native.format_bytes(tensor.numel()) == "3.0 MiB"


if __name__ == "__main__":
    main(globals())
