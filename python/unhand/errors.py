"""The exceptions that unhand raises on purpose; everything else is a bug."""


class Error(Exception):
    """Something unhand was asked for cannot be done; the message says why."""


class CaptureError(Error):
    """Refused because a CUDA graph is being captured: the memory of a capture must not be touched."""
