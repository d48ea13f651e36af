"""Scopes around code that runs in stretches: generators, coroutines, async generators.

Between two stretches somebody else's code runs, in the same thread, perhaps with a scope of its own. What that allocates
does not count: the wrapper sees each step begin and end.
"""

import functools
import inspect

from unhand import _scope


def wrapped(scope, function):
    """A function that makes what `function` makes, with a scope around each step; None if it does not run in stretches."""
    if inspect.isasyncgenfunction(function):
        return _async_generator(scope, function)
    if inspect.isgeneratorfunction(function):
        return _generator(scope, function)
    if inspect.iscoroutinefunction(function):
        return _coroutine(scope, function)
    return None


def _generator(scope, function):
    @functools.wraps(function)
    def generate(*args, **kwargs):
        run = _Steps(scope, function)
        return (yield from run.steps(function(*args, **kwargs), is_shared=True, is_last=True))

    return generate


def _coroutine(scope, function):
    @functools.wraps(function)
    async def call(*args, **kwargs):
        run = _Steps(scope, function)
        return await _Awaited(run.steps(function(*args, **kwargs), is_last=True))

    return call


def _async_generator(scope, function):
    @functools.wraps(function)
    async def generate(*args, **kwargs):
        run = _Steps(scope, function)
        inner = function(*args, **kwargs)
        step, argument = inner.asend, None
        try:
            while True:
                box = []
                try:
                    box.append(await _Awaited(run.steps(step(argument).__await__())))
                except StopAsyncIteration:
                    break
                run.pass_on(box[0])
                try:
                    # Not through a variable: the consumer has it alone.
                    step, argument = inner.asend, (yield box.pop())
                except GeneratorExit:
                    await _Awaited(run.steps(inner.aclose().__await__()))
                    raise
                except BaseException as error:
                    step, argument = inner.athrow, error
        except BaseException as error:
            run.close(error=error)
            raise
        run.close()

    return generate


class _Steps:
    """The run of a scope that is driven step by step."""

    def __init__(self, scope, function):
        self.run = _scope.Run(scope, in_steps=True)
        self.namespace = _scope._globals(function)

    def close(self, **how):
        """The scope is over."""
        self.run.close(namespace=self.namespace, **how)

    def pass_on(self, item):
        """Something goes to the consumer, and may stay."""
        self.run.keep.add_passed(item)

    def steps(self, inner, *, is_shared=False, is_last=False):
        """Drive a generator or coroutine. `is_shared`: what it yields goes to the consumer, and not to an event loop."""
        step, argument = inner.send if hasattr(inner, "send") else lambda _: next(inner), None
        while True:
            box = []
            try:
                box.append(self._step(step, argument))
            except StopIteration as stop:
                value = stop.value
                if is_last:
                    self.close(passed=(value,))
                return value
            except BaseException as error:
                if is_last:
                    self.close(error=error)
                raise
            argument = None
            if is_shared:
                self.pass_on(box[0])
            try:
                step, argument = inner.send, (yield box.pop())
            except GeneratorExit as error:
                try:
                    self._step(lambda _: inner.close(), None)
                finally:
                    if is_last:
                        self.close(error=error)
                raise
            except BaseException as error:
                step, argument = inner.throw, error

    def _step(self, step, argument):
        self.run.resume()
        try:
            return step(argument)
        finally:
            self.run.pause()


class _Awaited:
    """What `await` drives."""

    def __init__(self, steps):
        self.steps = steps

    def __await__(self):
        return self.steps
