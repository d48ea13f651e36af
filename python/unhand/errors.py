"""The exceptions of unhand; each says what to do."""


class Error(Exception):
    """The base of all exceptions that unhand raises itself."""


class FreedError(Error, RuntimeError):
    """The data of a tensor was used after `unhand.free` gave its memory back."""


class CaptureError(Error, RuntimeError):
    """Refused while a CUDA graph is being captured: releasing memory would break the capture."""


class LeakError(Error, RuntimeError):
    """Memory outlives what it was made for. `verdict` is the `Verdict` of `unhand.watch`; None elsewhere."""

    def __init__(self, message, verdict=None):
        super().__init__(message)
        self.verdict = verdict
