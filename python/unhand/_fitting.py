"""How many rows fit, as far as is known: halves on failure, grows back after successes, remembered for the whole process."""

import collections
import logging
import sys
import threading

from unhand import _allocator, _oom
from unhand.errors import CaptureError

# Successes in a row before more is tried. Doubled by each try that fails, so that tries that fail get rare.
_PATIENCE = 4
_MOST_PATIENCE = 512
# Places and shapes that are remembered; the one that was not used for longest is forgotten.
_MOST_REMEMBERED = 4096

_remembered = collections.OrderedDict()
_turn = threading.Lock()


class Size:
    """What is known about one place in the program and one shape of rows. Threads may share it."""

    __slots__ = ("_lock", "limit", "bad", "patience", "left")

    def __init__(self):
        self._lock = threading.Lock()
        # The largest that is believed to fit; `None` as long as nothing has failed.
        self.limit = None
        # The smallest beyond it that failed, as far as that still counts.
        self.bad = None
        self.patience = _PATIENCE
        # Successes at the limit until more is tried.
        self.left = _PATIENCE

    def choose(self, asked, least=1):
        """How many rows to try, at most as many as asked for."""
        limit = self.limit
        if limit is None or limit >= asked:
            return asked
        with self._lock:
            return max(min(self._next() if self.left <= 0 else self.limit, asked), min(least, asked))

    def _next(self):
        if self.bad is None or self.bad <= self.limit:
            return self.limit * 2
        # Between what fits and what does not, in round steps. Where they meet, what did not is tried again: memory that
        # another process had may be back.
        step = 1 << max(0, self.limit.bit_length() - 4)
        middle = (self.limit + self.bad) // 2 // step * step
        return middle if middle > self.limit else self.bad

    def fits(self, n):
        """So many rows went through."""
        if self.limit is None:
            return
        with self._lock:
            if n > self.limit:
                self.limit, self.left = n, 1
                if self.bad is not None and n >= self.bad:
                    self.bad, self.patience = None, _PATIENCE
            elif n == self.limit:
                self.left -= 1

    def failed(self, n, least=1, shrink=None):
        """So many did not; what to try next is at most half of it, or what `shrink(n)` says."""
        with self._lock:
            if self.limit is not None and n > self.limit:
                # A try at more than was known to fit. Those between narrow it down; one that failed before gets rare.
                if self.bad is not None and n >= self.bad:
                    self.patience = min(self.patience * 2, _MOST_PATIENCE)
            else:
                less = n // 2 if shrink is None else min(int(shrink(n)), n - 1)
                self.limit, self.patience = max(less, least), _PATIENCE
            self.bad = n
            self.left = self.patience


def remembered(key):
    """The size for a key; a new one if the key is `None`."""
    if key is None:
        return Size()
    with _turn:
        size = _remembered.pop(key, None) or Size()
        _remembered[key] = size
        if len(_remembered) > _MOST_REMEMBERED:
            _remembered.popitem(last=False)
    return size


def forget():
    """Forgets all sizes of the process."""
    with _turn:
        _remembered.clear()


class Attempt:
    """What has to be known when an attempt begins in order to clean up after it."""

    __slots__ = ("outer", "began_bytes", "tried", "n_failures")

    def __init__(self):
        refuse_capture()
        # What the caller is handling already is not the attempt's to clear.
        self.outer = sys.exc_info()[1]
        # Not known before the first failure: to read it takes longer than all the rest of a call that goes well.
        self.began_bytes = None
        self.tried = []
        self.n_failures = 0

    def recover(self, error, size, n, least, what="rows", shrink=None):
        """Whether to try again, with less. Then everything that the failed attempt held is gone, and `size` knows.

        Called in the handler of the error. The caller drops its own references first, raises where the answer is no,
        and otherwise leaves the handler before it tries again.
        """
        kind = _oom.kind(error)
        if kind is None:
            return False
        self.tried.append(n)
        self.n_failures += 1
        size.failed(n, least, shrink)
        if n <= least:
            add_note(error, f"unhand: out of memory ({kind}) with {n} {what}, and fewer are not allowed; tried {_listed(self.tried)}")
            return False
        logging.getLogger("unhand").info("out of memory (%s) with %d %s, next at most %d", kind, n, what, size.limit)
        # The first time nobody knows what was allocated before. What a look at young objects misses fails once more.
        _oom.let_go(error, self.outer, self.began_bytes, thorough=self.n_failures > 1)
        self.began_bytes = _oom.allocated()
        return True

    def went_well(self):
        """The attempt is over; the next may begin from here."""
        self.tried.clear()


def refuse_capture():
    """What fails during the capture of a CUDA graph spoils the capture, so it cannot be tried again."""
    torch = _allocator.started_torch()
    if torch is not None and torch._C._cuda_isCurrentStreamCapturing():
        raise CaptureError("a CUDA graph is being captured: out of memory would spoil it, so nothing could be tried again")


def add_note(error, note):
    """Adds a sentence to what an exception prints."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _listed(sizes):
    shown = [str(size) for size in sizes]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:4], "…", *shown[-4:]])
