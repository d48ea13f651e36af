"""The page of an out-of-memory recording: `report.txt`, one page of plain words."""

import os
import sysconfig
import textwrap

from unhand._native import format_bytes

_WIDTH = 100
_HOLDERS = 8
_FRAMES = 8
# Of what is reserved: less that is stuck is not worth a line.
_LEAST_SHARE = 0.005


def page(recording) -> str:
    """The whole page, for a [`_recording.Recording`]."""
    lines = [_heading(recording), ""]
    lines += _wrap(_what_failed(recording))
    if recording.verdict:
        lines += _wrap(recording.verdict)
    lines += _section("Where", _where(recording))
    if recording.settings is not None or recording.batch is not None:
        advice = [recording.settings["sentence"]] if recording.settings is not None else []
        if not advice:
            advice.append(f"Whether an allocator setting would have served the request cannot be told. {recording.history}")
        advice.append(str(recording.batch))
        lines += _section("What would have fitted", [line for text in advice for line in _item(text)])
    if recording.ladder is not None:
        lines += _section("The memory of the device", str(recording.ladder).splitlines())
    lines += _section("Held by", _holders(recording))
    lines += _section("What pins the stuck memory", _stuck(recording))
    lines += _section("This recording", _about(recording))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(recording):
    rank = f", rank {recording.rank} of {recording.world_size}" if recording.rank is not None else ""
    return f"Out of GPU memory on cuda:{recording.failure.device}{rank}, {recording.when}"


def _what_failed(recording) -> str:
    failure = recording.failure
    if failure.segment_bytes is None:
        first_line = (failure.error or "").strip().partition("\n")[0]
        return f"The error is not of PyTorch's allocator, so what was asked for is not known: {first_line}"
    if recording.requested_bytes is not None:
        text = f"A request of {format_bytes(recording.requested_bytes)} failed"
        if recording.requested_bytes != failure.segment_bytes:
            text += f" (PyTorch asked the driver for {format_bytes(failure.segment_bytes)})"
    else:
        text = f"PyTorch asked the driver for {format_bytes(failure.segment_bytes)} and did not get it"
    if failure.device_free_bytes is not None:
        text += f"; the driver had {format_bytes(failure.device_free_bytes)} free"
    if recording.room_bytes is not None:
        text += f", and PyTorch could have held {format_bytes(recording.room_bytes)} in all"
    return text + "."


def _where(recording) -> list[str]:
    lines = []
    if recording.node:
        lines.append(f"in the backward of autograd, at {recording.node}")
    if recording.stack_is_main:
        lines.append(f"on {recording.thread}, which runs no Python; what waits for it in the main thread:")
    elif recording.thread not in ("", "MainThread"):
        lines.append(f"on the thread {recording.thread}")
    own = [line for line in recording.stack if is_own(line.file)]
    shown = list(recording.stack[:2])
    shown += [line for line in own if line not in shown]
    for line in shown[:_FRAMES]:
        lines.append(f"{_short(line.file)}:{line.line}  {line.function}()" if line.function[0] != "<" else
                     f"{_short(line.file)}:{line.line}  {line.function}")
    hidden = len(recording.stack) - len(shown[:_FRAMES])
    if hidden > 0:
        lines.append(f"({hidden} more in report.json)")
    return lines or ["no Python code was running"]


_LIBRARIES = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()} | {f"{os.sep}torch{os.sep}"})


def is_own(file) -> bool:
    """Whether a file is the user's: neither of an installed package nor of Python itself."""
    return "site-packages" not in file and not file.startswith("<") and not any(path in file for path in _LIBRARIES)


def _short(file):
    """The end of a path: enough to find the file."""
    return os.sep.join(file.split(os.sep)[-2:]) if not is_own(file) else os.path.relpath(file) if _is_below(file) else file


def _is_below(file):
    try:
        return file.startswith(os.path.join(os.getcwd(), ""))
    except OSError:
        return False


def _holders(recording) -> list[str]:
    lines = []
    for holder in recording.holders[:_HOLDERS]:
        lines.append(f"{format_bytes(holder.bytes):>10}  {holder.kind:<16}  {holder.path}")
        lines += [" " * 30 + line for line in _fill(holder.advice, _WIDTH - 32)]
    more = sum(holder.bytes for holder in recording.holders[_HOLDERS:]) + (recording.more_holders_bytes or 0)
    if more:
        lines.append(f"{format_bytes(more):>10}  in more holders")
    if recording.unattributed_bytes:
        lines.append(f"{format_bytes(recording.unattributed_bytes):>10}  unattributed: no Python object leads to it")
    return lines


def _stuck(recording) -> list[str]:
    n_bytes = sum(stuck.bytes for stuck in recording.stuck)
    if recording.ladder is None or n_bytes < _LEAST_SHARE * (recording.ladder.reserved_bytes or 0):
        return []
    return [
        f"{format_bytes(stuck.bytes):>10}  in {_count(stuck.n_segments, 'segment')}, beside"
        f" {format_bytes(stuck.pin_bytes)} of {stuck.pinned_by}"
        for stuck in recording.stuck
    ]


def _about(recording) -> list[str]:
    lines = _item(f"History: {recording.history}")
    if "snapshot.pickle" in recording.files:
        lines += _item("`unhand explain` on this folder says more; PyTorch's own viewer reads snapshot.pickle, too.")
    for note in recording.notes:
        lines += _item(f"Not found out: {note}")
    return lines


def _count(number, word) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _section(title, lines) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _item(text) -> list[str]:
    first, *rest = _fill(text, _WIDTH - 4)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _wrap(text) -> list[str]:
    return _fill(text, _WIDTH)


def _fill(text, width) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
