"""`adaptive`: a function with a batch size among its arguments is called again with a smaller one when it is out of memory."""

import functools
import inspect

from unhand import _fitting


def adaptive(function=None, *, start=None, min=1, parameter=None, grow=True, shrink=None):
    """Call a function with a batch size that fits.

        @unhand.adaptive(start=256)
        def train(model, batch_size): …

        train(model)                    # 256, 128, … until it fits
        train(model, batch_size=1024)   # this call begins at 1024

    The size is the parameter `batch_size`, or else the first one after `self`, or the one that `parameter` names. The
    caller leaves it out or gives it by keyword, as the most for this call; the other arguments stay where they are, as
    if it were not there. `start` is the size of calls that give none; without it, the parameter's own default.

    Out of memory of any kind (`unhand.is_out_of_memory`) the size is halved, or becomes `shrink(size)`, down to `min`,
    and the call is made again. Before, all that the failed call held is let go. What the function changed before it
    failed stays changed: it has to begin anew each time. If `min` does not fit either, the error is raised, with a note
    of what was tried. Other errors are not touched.

    The size that fit is remembered for the function, for all threads. After some calls that went well a larger one is
    tried, at most what is asked for, unless `grow` is false. `train.forget()` forgets it.

    Methods, static and class methods (the decorator goes below theirs) and coroutine functions work the same way.
    TypeError for a generator function, which fails only when nobody can call it again, and for one without the
    parameter; `CaptureError` while the current stream captures a CUDA graph.
    """
    if function is None:
        return functools.partial(adaptive, start=start, min=min, parameter=parameter, grow=grow, shrink=shrink)
    if not callable(function):
        raise TypeError(f"`adaptive` decorates a function; a size goes in as `start={function!r}`")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator function: what it yielded cannot be taken back")
    return _decorated(function, _Call(function, start, min, parameter, grow, shrink))


def _decorated(function, call):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*arguments, **keywords):
            attempt, asked, size = call.begin(keywords)
            while True:
                n = size.choose(asked, call.least)
                try:
                    result = await call.with_size(n, arguments, keywords)
                except Exception as error:
                    if not attempt.recover(error, size, n, call.least, "of " + call.name, call.shrink):
                        raise
                else:
                    call.end(size, n)
                    return result

    else:

        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            attempt, asked, size = call.begin(keywords)
            while True:
                n = size.choose(asked, call.least)
                try:
                    result = call.with_size(n, arguments, keywords)
                except Exception as error:
                    if not attempt.recover(error, size, n, call.least, "of " + call.name, call.shrink):
                        raise
                else:
                    call.end(size, n)
                    return result

    wrapper.__signature__ = call.signature
    wrapper.forget = call.forget
    return wrapper


class _Call:
    """How the function is called, worked out once."""

    def __init__(self, function, start, least, parameter, grow, shrink):
        self.function, self.least, self.grow, self.shrink = function, least, grow, shrink
        signature = inspect.signature(function)
        self.name, self.place = _find(signature, parameter, function)
        own = signature.parameters[self.name]
        self.start = start if start is not None or own.default is own.empty else own.default
        if self.start is not None and (not isinstance(self.start, int) or self.start < least):
            raise ValueError(f"`start` is a size, at least {least}: got {self.start!r}")
        self.signature = _without_place(signature, own.replace(default=self.start if self.start is not None else own.empty))
        self.size = _fitting.Size()

    def forget(self):
        """Forget the size that fit."""
        self.size = _fitting.Size()

    def begin(self, keywords):
        asked = keywords.pop(self.name, self.start)
        if asked is None:
            raise TypeError(f"no size to begin with: give `{self.name}=…`, or `start=…` to `unhand.adaptive`")
        return _fitting.Attempt(), asked, self.size

    def with_size(self, n, arguments, keywords):
        if self.place is None or self.place > len(arguments):
            return self.function(*arguments, **{self.name: n}, **keywords)
        return self.function(*arguments[: self.place], n, *arguments[self.place :], **keywords)

    def end(self, size, n):
        if self.grow:
            size.fits(n)


def _find(signature, wanted, function):
    """The name of the parameter for the size, and its place among the positional ones, if it has one."""
    kinds = inspect.Parameter
    named = [one for one in signature.parameters.values() if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    if wanted is None:
        wanted = "batch_size" if "batch_size" in signature.parameters else None
        others = [one.name for one in named if one.name not in ("self", "cls")]
        wanted = wanted or (others[0] if others else None)
    found = [index for index, one in enumerate(named) if one.name == wanted]
    if not found:
        raise TypeError(f"{function.__qualname__} has no parameter {wanted or 'for a size'}")
    return wanted, found[0] if named[found[0]].kind is not kinds.KEYWORD_ONLY else None


def _without_place(signature, size):
    """The signature that callers see: the size may be given by keyword only."""
    kinds = inspect.Parameter
    size = size.replace(kind=kinds.KEYWORD_ONLY)
    others = [one for one in signature.parameters.values() if one.name != size.name]
    last = others.pop() if others and others[-1].kind is kinds.VAR_KEYWORD else None
    return signature.replace(parameters=[*others, size, *([last] if last is not None else [])])
