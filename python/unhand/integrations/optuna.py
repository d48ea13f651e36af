"""Optuna: each trial begins at the floor that the one before it began at, and what a trial leaves is named."""

import functools

from unhand._floor import Landing
from unhand.integrations._session import run, wrapped

__all__ = ["Landing", "trial"]


def trial(objective=None, *, everything=False, keep=(), on_landing=None):
    """An objective whose trials leave no GPU memory behind, however they end: returned, pruned, failed, out of memory.

        @unhand.integrations.optuna.trial
        def objective(trial): ...

    After each trial, tracebacks, dead cycles and caches are cleared, and the memory is returned to the driver. A loss on
    the GPU that the objective returns becomes a number. What is left after that, because a name outside of the trial has
    it (a list, a cache, `trial.set_user_attr`), is not the trial's to free: it is logged with its holders as a warning of
    the logger `unhand`. `everything` frees it too: all that was born in the trial, whoever holds it. What existed before
    the trial is never freed, nor is what belongs to `keep`.

    `on_landing(trial, landing)` gets the `Landing` of each trial. With `n_jobs` above 1 trials share the process:
    then nothing is said of what is left, and `everything` is not done. The wrapper has the objective as `__wrapped__`.
    """
    if objective is None:
        return functools.partial(trial, everything=everything, keep=keep, on_landing=on_landing)

    def call(objective, args, kwargs):
        of = args[0] if args else kwargs.get("trial")
        name = f"trial {getattr(of, 'number', '')}".strip()
        value, landing = run(name, objective, args, kwargs, everything, keep)
        if on_landing is not None:
            on_landing(of, landing)
        return value

    return wrapped(objective, call)
