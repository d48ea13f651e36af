"""`batches`: data in pieces whose size follows the memory there is. Out of memory, the same rows come again, fewer at a time."""

import sys

from unhand import _fitting, _rows
from unhand.errors import Error


def batches(data, size, *, min_size=1, dim=0, device=None, remember=True):
    """Go through data in pieces of at most `size` rows; fewer where that is out of memory, more again later.

    `data` is a tensor or an array (pieces are views of it, along `dim`), a list or another sequence, a dict or tuple of
    tensors or arrays of equal length (their rows go together; numbers, texts and `None` beside them are passed on), or
    any iterable, whose items are the rows and come as lists. With `device` each piece is moved there when it is its
    turn, so that no more than one is on the GPU.

    With a function, which is best: nothing of a failed attempt is alive when the next begins.

        for output in unhand.batches(data, 1024).map(model): …
        output = unhand.batches(data, 1024).concat(model)

    With a loop. All of the body goes into the `with`, since it runs again for the same rows when it is out of memory,
    and what comes after the `with` also runs then:

        for chunk in unhand.batches(data, 1024):
            with chunk as part:
                results.append(model(part).cpu())

    Out of memory of any kind (`unhand.is_out_of_memory`) halves the number of rows, down to `min_size`; if that does not
    fit either, the error is raised, with a note. Other errors are not touched. After some pieces that went well a larger
    one is tried, up to `size`: between what fit and what did not, then that again, less and less often as tries fail.

    The number that fits is remembered for the process, by line of the call, shape and type of the rows, and device:
    `remember=False` does not, and any other value takes the place of the line (a name, for calls that should share).

    Raises TypeError or ValueError for data without rows or with members of different lengths, and `CaptureError`, when
    a piece begins, while the current stream captures a CUDA graph. docs/guides/batches.md has the whole story.
    """
    if not isinstance(size, int) or size < 1 or not isinstance(min_size, int) or min_size < 1:
        raise ValueError(f"`size` and `min_size` are numbers of rows, at least 1: got {size!r} and {min_size!r}")
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno) if remember is True else remember
    return Batches(data, size, min(min_size, size), dim, device, place if remember is not False else None)


class Batches:
    """Data in pieces. Each pass begins at the first row, except over an iterator, which has only one."""

    def __init__(self, data, size, min_size, dim, device, place):
        self._data, self._dim, self._device, self._place = data, dim, device, place
        self.asked = size
        """How many rows a piece has at most."""
        self.min_size = min_size
        """How many it has at least, but for the last."""
        self.n_failures = 0
        """How often it was out of memory, over all passes."""
        self.sizes = []
        """How many rows the pieces had that went well, of the last pass."""

    def __iter__(self):
        return _Loop(_Pass(self))

    def map(self, function):
        """The results of `function(piece)`, one after the other, each made when it is asked for.

        Nothing here keeps a piece or a result.
        """
        going = _Pass(self)
        while going.has_more():
            # No local variable: it would keep the result alive while the next one is made.
            yield going.run(function)

    def concat(self, function, *, dim=0, to=None):
        """All results of `function(piece)` as one: tensors and arrays along `dim`, lists, dicts and tuples of them.

        With `to`, a device, each result goes there as soon as it is made: to the host, where all of them would not fit.
        Without, they are on their device twice for a moment, when they are put together. Without rows, what `function`
        makes of no rows.
        """
        going, results = _Pass(self), []
        while going.has_more() or not results:
            results.append(going.run(function) if to is None else going.run(lambda part: _rows.move(function(part), to)))
        return _rows.join(results, dim)


class _Pass:
    """One way through the data."""

    def __init__(self, owner):
        self.owner = owner
        self.rows = _rows.open_rows(owner._data, owner._dim)
        owner.sizes = []
        key = None
        if owner._place is not None:
            target = str(owner._device) if owner._device is not None else self.rows.device()
            key = ("batches", owner._place, self.rows.shape_class(), target)
        self.size = _fitting.remembered(key)
        self.attempt = _fitting.Attempt()

    def has_more(self):
        return self.rows.count(1) > 0

    def run(self, function):
        """The result for the next piece that fits."""
        attempt = self.attempt
        _fitting.refuse_capture()
        attempt.outer = sys.exc_info()[1]
        while True:
            n = self.rows.count(self.size.choose(self.owner.asked, self.owner.min_size))
            try:
                result = function(self.part(n))
            except Exception as error:
                if not self.recover(error, n):
                    raise
                continue
            self.went_well(n)
            return result

    def part(self, n):
        part, _ = self.rows.take(n)
        return part if self.owner._device is None else _rows.move(part, self.owner._device)

    def recover(self, error, n):
        n_failures = self.attempt.n_failures
        again = self.attempt.recover(error, self.size, n, self.owner.min_size)
        self.owner.n_failures += self.attempt.n_failures - n_failures
        return again

    def went_well(self, n):
        self.size.fits(n)
        self.attempt.went_well()
        self.owner.sizes.append(n)
        self.rows.advance(n)


class _Loop:
    """The iterator of a loop with `with`."""

    def __init__(self, going):
        self._going = going
        self._last = None

    def __iter__(self):
        return self

    def __next__(self):
        if self._last is not None and not self._last.entered:
            raise Error("the piece before was not entered: write `with chunk as part:` and put the work into it")
        self._last = None
        if not self._going.has_more():
            raise StopIteration
        chunk = self._last = Chunk(self._going)
        return chunk


class Chunk:
    """Some rows whose turn it is: a context manager that gives them, and forgives out of memory."""

    __slots__ = ("_going", "entered", "done", "start", "stop")

    def __init__(self, going):
        self._going = going
        self.entered = False
        """Whether its turn has begun."""
        self.done = False
        """Whether it went well. After an out-of-memory it is false, and the same rows come again."""
        self.start = going.rows.position
        """The first row."""
        self.stop = self.start + going.rows.count(going.size.choose(going.owner.asked, going.owner.min_size))
        """The row after the last."""

    def __enter__(self):
        if self.entered:
            raise Error("this piece has had its turn: take the next one from the loop")
        self.entered = True
        going = self._going
        _fitting.refuse_capture()
        going.attempt.outer = sys.exc_info()[1]
        while True:
            n = self.stop - self.start
            try:
                return going.part(n)
            except Exception as error:
                # What is raised here the `with` does not see, so the smaller piece is found here.
                if not going.recover(error, n):
                    raise
            self.stop = self.start + going.rows.count(going.size.choose(going.owner.asked, going.owner.min_size))

    def __exit__(self, kind, error, traceback):
        n = self.stop - self.start
        if error is None:
            self.done = True
            self._going.went_well(n)
            return False
        del traceback
        return isinstance(error, Exception) and self._going.recover(error, n)

    def __len__(self):
        return self.stop - self.start

    def __repr__(self):
        return f"<rows {self.start} to {self.stop} of unhand.batches: enter them with `with`>"
