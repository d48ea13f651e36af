"""What the scripts about integrations share: a tensor of some size, the floor of a check, and what the integrations say."""

import gc
import logging

import torch

MIB = 1 << 20


def big(mib=4):
    return torch.zeros(mib * MIB // 4, device="cuda")


def allocated():
    return torch.cuda.memory_allocated()


def nothing_left():
    """What is allocated when everything of a check is gone. Not with unhand.free(): here it looks at half a million objects."""
    while gc.collect():
        pass
    torch._C._cuda_clearCublasWorkspaces()
    return allocated()


class Warned(logging.Handler):
    """What the integrations say."""

    def __enter__(self):
        self.texts = []
        logging.getLogger("unhand").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("unhand").removeHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())
