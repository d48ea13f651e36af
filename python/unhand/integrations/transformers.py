"""transformers: a `Trainer` gives back its model, optimizer and accelerator, between trials too, and logs memory figures."""

import functools

from transformers import TrainerCallback

from unhand import _floor, _watch
from unhand._free import Freed
from unhand.integrations import _session
from unhand.integrations._session import as_list
from unhand.integrations.accelerate import forget, forget_state

__all__ = ["MemoryCallback", "log_memory", "release", "release_between_trials", "session"]

_USERS = (
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "processing_class",
)
"""What a `Trainer` was given and only uses, beside callbacks; what a function closes over is never its user's."""


def release(trainer, *, keep=()) -> Freed:
    """Give back the GPU memory of a `Trainer`: model, wrapped model, optimizer, what its accelerator prepared, batches.

    Whatever names still refer to them; a use of a freed model raises `unhand.FreedError`. Datasets, the collator, the
    functions and callbacks that the trainer was given stay. `keep` is an object, or a list of them, whose memory stays:
    `release(trainer, keep=trainer.model)` after `train()` leaves the model and gives back the optimizer's state, and
    `train()` again begins with a new state.
    """
    freed = _floor.release(trainer, keep=keep, without=_used(trainer))
    _forget(trainer, keep)
    return freed


def session(trainer, *, keep=()) -> _session.Session:
    """`with session(trainer): trainer.train()` releases on the way out, also after an error.

    After it `landing` says what came back and, if that is not the floor, who holds the rest. After an out-of-memory error
    `report` is the report of that moment, and it is logged.
    """

    def give_back(floor, trainer):
        landing = _floor.back_to(floor, "training", trainer, keep=keep, without=_used(trainer), spares=False)
        _forget(trainer, keep)
        return landing

    return _session.Session("training", give_back, trainer)


def release_between_trials(trainer):
    """Let the trainer release the model of one trial before it makes that of the next; returns the trainer.

    For a `Trainer` with `model_init`, as `hyperparameter_search` wants it. Without this it makes the next model while it
    has the last one, with its optimizer. ValueError for a trainer without `model_init`.
    """
    make = getattr(trainer, "model_init", None)
    if make is None:
        raise ValueError("the trainer has no `model_init`, so it makes no models")

    # The trainer counts the arguments of `model_init`, through `__wrapped__`.
    @functools.wraps(make)
    def model_init(*args):
        release(trainer)
        return make(*args)

    trainer.model_init = model_init
    return trainer


def log_memory(trainer, *, on_leak="log") -> "MemoryCallback":
    """Add a `MemoryCallback` before the trainer's other callbacks, so that what they report has its figures."""
    callback = MemoryCallback(on_leak=on_leak)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class MemoryCallback(TrainerCallback):
    """Adds the figures of `unhand.log_dict()` to what a `Trainer` logs, as `gpu_memory/…`. Resets no peak.

    As one of `Trainer(callbacks=[…])` it comes after TensorBoard's and its kin, and only `state.log_history` has the
    figures; `log_memory(trainer)` puts it before them.

    It watches the steps for leaks too, as `unhand.watch(on_leak=…)` does; None does not watch. `watch` is that of the
    training at hand, or of the last one.
    """

    def __init__(self, *, on_leak="log"):
        self.on_leak = on_leak
        self.watch = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Called by the trainer."""
        self.watch = _watch.watch(on_leak=self.on_leak) if self.on_leak is not None else None

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the trainer."""
        if self.watch is not None:
            self.watch.step()

    def on_train_end(self, args, state, control, **kwargs):
        """Called by the trainer."""
        if self.watch is not None:
            self.watch.close()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Called by the trainer."""
        if logs is not None:
            figures = _session.figures()
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)


def _used(trainer) -> list:
    used = [getattr(trainer, name, None) for name in _USERS]
    handler = getattr(trainer, "callback_handler", None)
    return [*used, *getattr(handler, "callbacks", [])]


def _forget(trainer, keep):
    kept = {id(thing) for thing in as_list(keep)}
    optimizer = getattr(trainer, "optimizer", None)
    if optimizer is not None:
        forget_state(optimizer, kept)
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is not None:
        forget(accelerator, keep)
