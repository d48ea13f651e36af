"""The exceptions of unhand; each says what to do."""


class Error(Exception):
    """The base of all exceptions that unhand raises itself."""


class FreedError(Error, RuntimeError):
    """The data of a tensor was used after `unhand.free` gave its memory back."""


class CaptureError(Error, RuntimeError):
    """Refused while a CUDA graph is being captured: releasing memory would break the capture."""


class LeakError(Error, RuntimeError):
    """GPU memory that was born inside of a scope outlives it; `result` is the scope's answer."""

    def __init__(self, message, result=None):
        super().__init__(message)
        self.result = result
