"""Estimates the batch size that would have fitted, from the shapes of the tensors that were alive. Knows no PyTorch.

What a step keeps for its backward pass has the batch as its leading dimension, or a multiple of it where dimensions were
flattened together. Parameters, gradients and the state of optimizers have not; they are told by the shapes of parameters.
"""

from dataclasses import dataclass
from typing import NamedTuple

from unhand._answer import fields
from unhand._native import format_bytes

# Of several sizes that explain the activations about as well, the largest is the batch: the others divide it.
_AS_GOOD = 0.95
# With less than this share of the activations explained there is no common dimension.
_LEAST_SHARE = 0.5
# From here on an estimate that the inputs confirm is more than a guess.
_GOOD_SHARE = 0.8


class Shaped(NamedTuple):
    """A storage on the device: its size, and the shape of the largest tensor over it."""

    bytes: int
    shape: tuple


class Input(NamedTuple):
    """A tensor that looks like data: no parameter, without a gradient, in a local variable of the program."""

    name: str
    shape: tuple


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The batch size that would have fitted: an estimate, with what it rests on."""

    size: int | None
    """The batch size of the run: the leading dimension that the activations have in common; None where there is none."""
    fits: int | None
    """The largest that would have fitted; None where it cannot be told."""
    confidence: str
    """`none`, `low` or `medium`."""
    scaling_bytes: int | None
    """Allocated bytes that grow with the batch."""
    fixed_bytes: int | None
    """Allocated bytes that do not: parameters, gradients, optimizer state, and whatever nothing is known about."""
    reason: str
    """How it was worked out, or why it cannot be told."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)

    def __str__(self):
        if self.fits is None:
            return f"The batch size that would have fitted cannot be told: {self.reason}"
        return f"A batch of about {self.fits:,} instead of {self.size:,} would have fitted ({self.confidence} confidence): {self.reason}"


def estimate(
    storages, parameter_shapes, inputs, *, allocated_bytes, failed_bytes, room_bytes, missing_bytes=0, in_backward=False
) -> BatchSize:
    """The batch size that would have fitted.

    `storages` are those on the device ([`Shaped`]), `parameter_shapes` the shapes of parameters, `inputs` the data
    ([`Input`]). `allocated_bytes` is what was allocated, `failed_bytes` what the failed request asked for on top,
    `room_bytes` what could be held. `missing_bytes` are gradients that the backward pass has yet to make, whatever the
    batch. All sizes are in bytes.
    """
    known = set(parameter_shapes) | {shape[::-1] for shape in parameter_shapes}
    activations = [one for one in storages if one.shape and one.shape not in known and min(one.shape) > 0]
    total = sum(one.bytes for one in activations)
    if not total:
        return _cannot("no tensor is alive that is not shaped like a parameter.")
    data = {one.shape[0] for one in inputs if one.shape}
    size, explained, is_confirmed = _common(activations, data, total)
    if size is None:
        return _cannot("the tensors that are no parameters have no leading dimension in common.")
    if size == 1:
        return _cannot("the batch size is 1 already, as far as the shapes tell.", size)
    fixed = allocated_bytes - explained + missing_bytes
    growing = explained + failed_bytes
    free_for_batch = room_bytes - fixed
    share = explained / total
    basis = (
        f"{format_bytes(explained)} in storages whose leading dimension is {size:,} or a multiple of it, and the "
        f"{format_bytes(failed_bytes)} that failed, are taken to grow with the batch; {format_bytes(fixed)} are not; "
        f"{format_bytes(room_bytes)} could be held."
    )
    if missing_bytes:
        basis += f" {format_bytes(missing_bytes)} of what does not grow are gradients that are still to come."
    fits = size * free_for_batch // growing
    if fits >= size:
        basis += " By that count the batch did fit: what failed is the layout of the memory, not its amount."
        return BatchSize(size, None, "none", explained, fixed, basis)
    if fits < 1:
        basis += " By that count not even a batch of 1 fits."
        return BatchSize(size, None, "none", explained, fixed, basis)
    if not in_backward:
        basis += " It failed before the backward pass: what the rest of the step needs is not in it, so take it as a bound."
    if fits >= 100:
        # No more digits than an estimate has.
        fits -= fits % 10 ** (len(str(fits)) - 2)
    is_good = is_confirmed and share >= _GOOD_SHARE and in_backward
    return BatchSize(size, fits, "medium" if is_good else "low", explained, fixed, basis)


def _cannot(reason, size=None) -> BatchSize:
    return BatchSize(size, None, "none", None, None, reason)


def _common(activations, data, total):
    """The leading dimension in common, the bytes that have it, and whether the inputs have it, too."""
    weights: dict[tuple[int, bool], int] = {}
    for one in activations:
        key = one.shape[0], len(one.shape) == 1
        weights[key] = weights.get(key, 0) + one.bytes

    def explained(size):
        # A multiple is a batch flattened with another dimension; a vector is rather a buffer, as those of optimizers.
        return sum(n for (leading, is_flat), n in weights.items() if leading == size or (not is_flat and leading % size == 0))

    for candidates, is_confirmed in ((data, True), ({leading for leading, _ in weights}, False)):
        scores = {size: explained(size) for size in candidates if size > 1}
        best = max(scores.values(), default=0)
        if best >= _LEAST_SHARE * total:
            size = max(size for size, score in scores.items() if score >= _AS_GOOD * best)
            return size, scores[size], is_confirmed
    ones = sum(n_bytes for (leading, _), n_bytes in weights.items() if leading == 1)
    if 1 in data or ones >= _LEAST_SHARE * total:
        return 1, 0, False
    return None, 0, False
