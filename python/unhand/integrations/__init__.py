"""Memory back after each run of another library: one module for each, which imports that library and nothing else.

    from unhand.integrations import transformers

    with transformers.session(trainer):     # on the way out, whatever happens, its memory goes back to the driver
        trainer.train()

`release(…)` does that at once; both take `keep`, whose memory stays. Importing this package imports none of the libraries.
"""

import importlib

_NAMES = ("accelerate", "diffusers", "lightning", "optuna", "peft", "ray", "transformers", "vllm")

__all__ = list(_NAMES)


def __getattr__(name):
    if name not in _NAMES:
        raise AttributeError(f"module `unhand.integrations` has no attribute `{name}`")
    return importlib.import_module(f"unhand.integrations.{name}")


def __dir__():
    return sorted([*globals(), *_NAMES])
