"""Sizes as people write them: `2 GiB` is a number of bytes."""

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power


def parse(size) -> int:
    """Bytes of a size such as `"2 GiB"`, `"1.5MB"` (decimal, as it says) or a plain number; the command line reads the same.

    ValueError for what is none, TypeError for what is neither text nor a whole number.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"not a size: `{size}`")
        return size
    if not isinstance(size, str):
        raise TypeError(f"not a size: `{size!r}` (a text such as \"2 GiB\", or a number of bytes)")
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
    scale = _UNITS.get(found[2].lower()) if found else None
    if scale is None:
        raise ValueError(f"not a size: `{size}` (a number and a unit such as GiB)")
    whole, _, fraction = found[1].partition(".")
    return int(whole or 0) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
