"""Lightning: a `Trainer` leaves nothing on the GPU after a fit or a failure, and logs memory figures.

For both packages, `lightning` (`lightning.pytorch`) and `pytorch_lightning`.
"""

import functools
import sys

from unhand import _floor, _watch
from unhand._free import Freed
from unhand.integrations import _session

__all__ = ["MemoryCallback", "release", "session"]


def release(trainer, *, keep=()) -> Freed:
    """Give back the GPU memory of a Lightning `Trainer`: module, optimizers, results, metrics, predictions, batches.

    Whatever names still refer to them. Data modules, loaders' datasets and callbacks stay, and so does `keep`, an object
    or a list of them: `release(trainer, keep=module)`.
    """
    return _floor.release(trainer, keep=keep, without=_used(trainer))


def session(trainer, *, keep=()) -> _session.Session:
    """`with session(trainer): trainer.fit(module)` releases on the way out, also after an error.

    After it `landing` says what came back and, if that is not the floor, who holds the rest. After an out-of-memory error
    `report` is the report of that moment, and it is logged.
    """

    def give_back(floor, trainer):
        return _floor.back_to(floor, "fit", trainer, keep=keep, without=_used(trainer), spares=False)

    return _session.Session("fit", give_back, trainer)


def _used(trainer) -> list:
    used = [*trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None)]
    for loop in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        loaders = getattr(getattr(trainer, loop, None), "_combined_loader", None)
        used += [getattr(loader, "dataset", None) for loader in getattr(loaders, "flattened", [])]
    return used


def __getattr__(name):
    if name != "MemoryCallback":
        raise AttributeError(f"module `unhand.integrations.lightning` has no attribute `{name}`")
    # Each package has a class of its own for callbacks. One with all bases fits whichever made the trainer.
    found = [sys.modules[place].Callback for place in ("lightning.pytorch", "pytorch_lightning") if place in sys.modules]
    if not found:
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback
        found = [Callback]
    return _callback(tuple(found))


@functools.cache
def _callback(bases):
    class MemoryCallback(*bases):
        """Logs the figures of `unhand.log_dict()` with `log_every_n_steps`, as `gpu_memory/…`. Resets no peak.

        With `release` all memory of the trainer goes back when it is torn down; `keep` stays. It watches the steps for
        leaks too, as `unhand.watch(on_leak=…)` does; None does not watch.
        """

        def __init__(self, *, release=False, keep=(), on_leak="log"):
            super().__init__()
            self.release, self.keep, self.on_leak = release, keep, on_leak
            self.freed = self.watch = None

        def on_train_start(self, trainer, pl_module):
            """Called by the trainer."""
            self.watch = _watch.watch(on_leak=self.on_leak) if self.on_leak is not None else None

        def on_train_end(self, trainer, pl_module):
            """Called by the trainer."""
            if self.watch is not None:
                self.watch.close()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            """Called by the trainer."""
            if self.watch is not None:
                self.watch.step()
            if trainer.loggers and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
                for logger in trainer.loggers:
                    logger.log_metrics(_session.figures(), step=trainer.global_step)

        def on_exception(self, trainer, pl_module, exception):
            """Called by the trainer."""
            _session.report_out_of_memory("fit", exception)

        def teardown(self, trainer, pl_module, stage):
            """Called by the trainer."""
            if self.release:
                self.freed = release(trainer, keep=self.keep)

    MemoryCallback.__qualname__ = "MemoryCallback"
    return MemoryCallback
