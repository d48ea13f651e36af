"""Ray Tune and Ray tasks: a function of a worker that is used again begins at the floor each time."""

import functools

from unhand._floor import Landing
from unhand.integrations._session import run, wrapped

__all__ = ["Landing", "trainable"]


def trainable(function=None, *, everything=False, keep=(), on_landing=None):
    """A trainable, task or method of an actor that leaves no GPU memory behind in its worker.

        tuner = ray.tune.Tuner(unhand.integrations.ray.trainable(train), …)

    Ray keeps workers and uses them again: what one call leaves, the next one misses. Works in the process of the worker,
    after each call, as `unhand.integrations.optuna.trial` does, and takes the same options; `on_landing(landing)` gets the
    `Landing`. Goes inside of `ray.remote` and of `tune.with_resources`, around the plain function.
    """
    if function is None:
        return functools.partial(trainable, everything=everything, keep=keep, on_landing=on_landing)

    def call(function, args, kwargs):
        value, landing = run(getattr(function, "__name__", "trainable"), function, args, kwargs, everything, keep)
        if on_landing is not None:
            on_landing(landing)
        return value

    return wrapped(function, call)
