"""The exceptions of unhand; each says what to do."""


class Error(Exception):
    """The base of all exceptions that unhand raises itself."""


class FreedError(Error, RuntimeError):
    """The data of a tensor was used after `unhand.free` gave its memory back."""


class CaptureError(Error, RuntimeError):
    """Refused while a CUDA graph is being captured: releasing memory would break the capture."""


class StandinError(Error, RuntimeError):
    """What was run on the stand-in failed there; its traceback is in the message."""


class LeakError(Error, RuntimeError):
    """Memory outlives what it was made for.

    `verdict` is the `Verdict` of `unhand.watch`, `result` the `ScopeResult` of `unhand.scope`; None where another raised it.
    """

    def __init__(self, message, verdict=None, result=None):
        super().__init__(message)
        self.verdict, self.result = verdict, result
