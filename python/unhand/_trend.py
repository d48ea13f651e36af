"""Whether a figure that is read once a step grows: robust statistics in bounded memory. Knows no PyTorch and no clock."""

import math
from collections import deque
from dataclasses import dataclass

_WINDOW = 16
"""Blocks that a level remembers."""
_UPS = (1 << (_WINDOW - 1)) - 1
_ENOUGH = _WINDOW - 2
"""Ups among the last 15 that make a rise. In random order 16 values have that many once in 10^8 times."""
_SURE = 1.96
"""The normal quantile of an interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How fast the floor of a figure rises. Times are counted in samples, beginning with 0."""

    per_sample: float
    """The median of the slopes between all pairs of blocks (Theil and Sen)."""
    low: float
    """The lower end of the 95 % interval of that (Sen 1968, from the variance of Kendall's S)."""
    high: float
    """The upper end."""
    since: int
    """The sample with which it began, as far back as is remembered."""
    n_samples: int
    """How many samples the window behind these figures covers."""


class Trend:
    """The floor of one figure at every time scale.

    Level k has the minima of the last 16 blocks of 2^k samples. Noise goes up and down, and its minima do not rise; what
    is cleared regularly has a flat floor at the scale of its period; a leak raises the floor at every scale above its
    own. A level *rises* when (nearly) each block is above the one before. Memory: 16 numbers a level, and a level more
    each time the number of samples doubles. `add` touches two levels on average.
    """

    __slots__ = ("n_samples", "rising", "_levels")

    def __init__(self):
        self.n_samples = 0
        self.rising = 0
        """A bit for each level that rises, the finest is bit 0."""
        self._levels = [_Level()]

    def add(self, value):
        """One more sample."""
        self.n_samples += 1
        bit = 1
        for level in self._levels:
            ups = level.ups = (level.ups << 1 | (value > level.last)) & _UPS
            level.last = value
            level.n_blocks += 1
            floors = level.floors
            floors.append(value)
            if ups.bit_count() >= _ENOUGH and _is_one_rise(floors):
                self.rising |= bit
            elif self.rising & bit:
                self.rising ^= bit
            first = level.first
            if first is None:
                level.first = value
                return
            level.first = None
            if first < value:
                value = first
            bit <<= 1
        level = _Level()
        level.push_first(value)
        self._levels.append(level)

    def rises(self, n_samples) -> int | None:
        """The finest level that rises over at least so many samples; None if none does."""
        coarse_enough = 0
        while _WINDOW << coarse_enough < n_samples:
            coarse_enough += 1
        level, rising = coarse_enough, self.rising >> coarse_enough
        latest = self._levels[0].last
        while rising:
            # A floor that has just been undercut: the block that shows it is not complete.
            if rising & 1 and latest >= self.floor(level):
                return level
            level, rising = level + 1, rising >> 1
        return None

    def scale(self, level) -> int:
        """How many samples apart the rises are, at most: the finest block that still rises, from this level down."""
        while level and self.rising >> (level - 1) & 1:
            level -= 1
        return 1 << level

    def lowest_rising(self) -> int:
        """The finest level that rises; one has to."""
        return (self.rising & -self.rising).bit_length() - 1

    def floor(self, level):
        """The floor of the last block of a level."""
        return self._levels[level].floors[-1]

    def growth(self, level) -> Growth:
        """How fast the floor rises, by the blocks of one level, or of a finer one where that has fewer than two."""
        while level and (level >= len(self._levels) or self._levels[level].n_blocks < 2):
            level -= 1
        known = self._levels[level]
        floors, length = list(known.floors), 1 << level
        slopes = sorted(
            (floors[later] - floors[earlier]) / ((later - earlier) * length)
            for later in range(1, len(floors))
            for earlier in range(later)
        )
        slope = _median(slopes)
        n = len(floors)
        reach = _SURE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
        last = len(slopes) - 1
        low = slopes[max(0, math.floor((last - reach) / 2))]
        high = slopes[min(last, math.ceil((last + reach) / 2))]
        if level and self.scale(level) == length:
            # Blocks as long as the time between two rises: a rise more or less falls into the window by chance.
            low, high = low - slope / n, high + slope / n
        start = (known.n_blocks - n) * length
        return Growth(slope, low, high, self._since(level, floors, slope, start), n * length)

    def floors(self) -> list[tuple[int, int, float]]:
        """The floor over the whole run, as (first sample, number of samples, floor), in 8 to 40 blocks."""
        whole = next(index for index, level in enumerate(self._levels) if level.n_blocks <= _WINDOW)
        return self._floors_until(whole, 0, self.n_samples)

    def _floors_until(self, coarsest, start, end):
        """The blocks between two samples, from one level and then, for what it has not completed, from finer ones."""
        found, at = [], start
        for index in range(coarsest, -1, -1):
            level, length = self._levels[index], 1 << index
            first = (level.n_blocks - len(level.floors)) * length
            for place, floor in enumerate(level.floors):
                begin = first + place * length
                if begin >= at and begin + length <= end:
                    found.append((begin, length, floor))
                    at = begin + length
        return found

    def _since(self, level, floors, slope, start) -> int:
        """Where the line through the blocks of a level left what was before them."""
        if slope <= 0:
            return start
        length = 1 << level
        # The floor of a block that rises is its first sample.
        blocks = [(start + place * length, length, floor) for place, floor in enumerate(floors)]
        offset = _median(sorted(floor - slope * begin for begin, _, floor in blocks))
        noise = max(abs(floor - offset - slope * begin) for begin, _, floor in blocks[len(blocks) // 2 :])
        since = start
        for begin, n, floor in reversed(self._before(level, start) + blocks):
            if floor - offset - slope * begin > max(slope * n / 2, 2 * noise):
                return min(max(begin, round((floor - offset) / slope)), begin + n)
            since = begin
        return since

    def _before(self, level, end):
        """The blocks before a sample, from ever coarser levels the further back they are."""
        found = []
        for index in range(level + 1, len(self._levels)):
            known, length = self._levels[index], 1 << index
            first = (known.n_blocks - len(known.floors)) * length
            blocks = [(first + place * length, length, floor) for place, floor in enumerate(known.floors)]
            blocks = [block for block in blocks if block[0] + length <= end]
            if blocks:
                found = blocks + found
                end = blocks[0][0]
        return found


class _Level:
    """The minima of blocks of one length."""

    __slots__ = ("floors", "ups", "last", "first", "n_blocks")

    def __init__(self):
        self.floors = deque(maxlen=_WINDOW)
        # A bit for each of the last blocks, the latest is bit 0: whether it was above the one before.
        self.ups = 0
        self.last = math.inf
        # The first half of the next block of the level above.
        self.first = None
        self.n_blocks = 0

    def push_first(self, value):
        """The first block of a new level."""
        self.floors.append(value)
        self.last = self.first = value
        self.n_blocks = 1


def _is_one_rise(floors) -> bool:
    """Whether blocks that rise one after the other, but for one, are one rise and not two teeth of a saw."""
    values = list(floors)
    quarter = len(values) // 4
    return min(values[2 * quarter :]) > max(values[:quarter]) and values[-1] == max(values)


def _median(ordered):
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What the last samples of a figure look like."""

    kind: str
    """`flat`, `step` (it changed, and is flat since), `periodic`, or `varying`."""
    period: int | None
    """Samples after which the figure repeats; None if it does not."""
    spread: float
    """The largest sample less the smallest."""


def shape(values, slope=0.0) -> Shape:
    """What samples look like, apart from a growth of `slope` a sample.

    A period is the shortest lag at which 98 % of the samples come again, to a fiftieth of the spread, after a shorter lag at
    which they do not; it has to be seen three times.
    """
    values = [value - slope * index for index, value in enumerate(values)]
    spread = max(values, default=0) - min(values, default=0)
    if spread == 0:
        return Shape("flat", None, 0)
    tail = values[-max(2, len(values) // 3) :]
    is_flat_now = max(tail) == min(tail)
    changes = sum(earlier != later for earlier, later in zip(values, values[1:]))
    if changes <= 3 and is_flat_now:
        return Shape("step", None, spread)
    has_differed = False
    for lag in range(1, len(values) // 3 + 1):
        if not _comes_again(values, lag, spread / 50):
            has_differed = True
        elif has_differed:
            return Shape("periodic", lag, spread)
    return Shape("step" if is_flat_now else "varying", None, spread)


def _comes_again(values, lag, tolerance) -> bool:
    allowed = (len(values) - lag) // 50
    for earlier, later in zip(values, values[lag:]):
        if abs(later - earlier) > tolerance:
            allowed -= 1
            if allowed < 0:
                return False
    return True


def patience(samples_left) -> int:
    """How many samples a growth must go on before it is believed, by how many are left until memory runs out.

    An eighth of what is left, and no more than 128 nor less than 16: what runs out soon has to be told soon, and what has
    thousands of steps to go can be looked at long enough to tell it from a list that an epoch clears.
    """
    return 128 if samples_left is None else int(min(128, max(_WINDOW, samples_left / 8)))
