"""What the statistics behind `unhand.watch` take for growth and what not, in made-up figures. Needs no PyTorch."""

import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "standin"))

from bench import main

from unhand._trend import Trend, patience, shape

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ImportError:
    # Then the same properties are tried with a fixed sequence of numbers.
    given = None

MIB = 1 << 20


def trend_of(figures):
    trend = Trend()
    for value in figures:
        trend.add(value)
    return trend


def told_at(figures, n_samples=128):
    """The number of samples after which a rise over `n_samples` is told, and the growth; None if never."""
    trend = Trend()
    for index, value in enumerate(figures):
        trend.add(value)
        level = trend.rises(n_samples)
        if level is not None:
            return index + 1, trend.growth(level), trend.scale(level)
    return None


def for_seeds(n):
    """Run a check with many generators of random numbers: hypothesis shrinks to the smallest seed that fails."""

    def decorate(check):
        if given is not None:
            # A check has no parameters for `main`.
            return settings(max_examples=n, deadline=None, database=None)(given(st.integers(0, 2**32))(check))
        return lambda: [check(seed) for seed in range(n)] and None

    return decorate


def check_a_straight_line_is_told_when_it_was_long_enough():
    for need, expected in ((16, 15), (32, 30), (64, 60), (128, 120)):
        at, growth, scale = told_at((1000 + 512 * i for i in range(500)), need)
        assert at == expected and scale == 1, (need, at, scale)
        assert growth.per_sample == growth.low == growth.high == 512 and growth.since == 0, growth


@for_seeds(40)
def check_the_beginning_of_a_leak_is_found(seed):
    random_ = random.Random(seed)
    begin, slope = random_.randrange(3000), random_.choice([512, 4096, MIB])
    at, growth, _ = told_at(50 * MIB + slope * max(0, i - begin) for i in range(5000))
    assert begin < at <= begin + 144, (begin, at)
    assert abs(growth.since - begin) <= 24, (begin, growth)
    assert abs(growth.per_sample / slope - 1) < 0.15, growth


@for_seeds(40)
def check_any_leak_is_told_through_noise(seed):
    """However large the noise is: its minima settle, and the leak goes on."""
    random_ = random.Random(seed)
    slope, noise = random_.choice([512, 8192]), random_.choice([8192, MIB])
    found = told_at((slope * i + random_.randrange(noise) for i in range(30_000)))
    assert found is not None, (slope, noise)
    assert found[1].low <= slope * 1.1 and found[1].high >= slope * 0.9, (slope, found)


@for_seeds(40)
def check_a_leak_every_so_many_samples_is_told(seed):
    random_ = random.Random(seed)
    period, size = random_.randrange(2, 60), random_.choice([512, MIB])
    found = told_at(size * (i // period) + 3 * MIB * (i % period == 1) for i in range(100 * period + 300))
    assert found is not None, period
    at, growth, scale = found
    assert at <= max(160, 40 * period) and scale >= period / 2, (period, at, scale)
    assert growth.low <= size / period * 1.05 and growth.high >= size / period * 0.95, (period, growth)


@for_seeds(40)
def check_noise_is_no_leak(seed):
    random_ = random.Random(seed)
    sizes = [random_.randrange(1, 512 * MIB) for _ in range(random_.choice([2, 10, 1000]))]
    assert told_at((random_.choice(sizes) for _ in range(20_000)), 16) is None


@for_seeds(60)
def check_what_is_cleared_in_time_is_no_leak(seed):
    """A saw: a list that grows and is cleared, with noise and with another period of the same."""
    random_ = random.Random(seed)
    period = random_.randrange(2, 100)
    other = random_.choice([n for n in range(1, period + 1) if period % n == 0])
    figures = ((i % period) * 4096 + (i % other) * 512 + random_.choice([0, 0, 512]) for i in range(6000))
    assert told_at(figures) is None, (period, other)


@for_seeds(40)
def check_steps_are_no_leak(seed):
    """A few steps up at any times, then flat: caches, state of optimizers, larger batches."""
    random_ = random.Random(seed)
    times = sorted(random_.randrange(3000) for _ in range(random_.randrange(1, 13)))
    assert told_at((sum(MIB for time in times if time <= i) for i in range(6000))) is None, times


@for_seeds(20)
def check_records_of_a_peak_are_no_leak(seed):
    """The largest so far, which rises ever more seldom: what the allocator reserves under random sizes."""
    random_ = random.Random(seed)
    top, figures = 0, []
    for _ in range(20_000):
        top = max(top, random_.randrange(1 << 30))
        figures.append(top)
    assert told_at(figures) is None


def check_memory_is_bounded():
    trend = Trend()
    for i in range(200_000):
        trend.add(i * 512)
    assert len(trend._levels) == 18 and sum(len(level.floors) for level in trend._levels) <= 16 * 18
    blocks = trend.floors()
    assert 8 <= len(blocks) <= 40, len(blocks)
    assert blocks[0][0] == 0 and blocks[-1][0] + blocks[-1][1] == 200_000
    assert all(begin + n == following for (begin, n, _), (following, *_) in zip(blocks, blocks[1:])), blocks
    assert all(floor == begin * 512 for begin, _, floor in blocks)


@for_seeds(40)
def check_the_floor_is_that_of_all_samples(seed):
    random_ = random.Random(seed)
    figures = [random_.randrange(1000) for _ in range(random_.randrange(1, 700))]
    for begin, n, floor in trend_of(figures).floors():
        assert floor == min(figures[begin : begin + n])


@for_seeds(60)
def check_a_period_is_found(seed):
    random_ = random.Random(seed)
    period = random_.randrange(2, 60)
    one = [random_.randrange(100) * MIB for _ in range(period)]
    slope = random_.choice([0, 4096])
    found = shape([one[i % period] + slope * i for i in range(256)], slope)
    # One period may itself be made of shorter ones, or be flat.
    assert found.kind in ("periodic", "flat") and period % (found.period or 1) == 0, (period, one, found)


def check_shapes():
    assert shape([5] * 100).kind == "flat" and shape([]).kind == "flat" and shape([7]).kind == "flat"
    assert shape([5] * 40 + [9] * 40).kind == "step"
    assert shape([i * 8 for i in range(60)], 8).kind == "flat"
    assert shape([0] * 5 + [9] + [0] * 5 + list(range(40)) + [3] * 60).kind == "step"
    assert shape(list(range(100)) * 2).kind == "varying", "seen twice only, and smooth"
    assert shape(([0] * 59 + [7]) * 4).period == 60
    random_ = random.Random(0)
    found = shape([random_.randrange(1000) for _ in range(200)])
    assert found.kind == "varying" and found.period is None and 900 < found.spread < 1000


def check_what_runs_out_soon_is_told_soon():
    assert patience(None) == 128 and patience(10**9) == 128 and patience(0) == 16 and patience(400) == 50
    assert sorted(map(patience, range(0, 3000, 7))) == list(map(patience, range(0, 3000, 7)))


if __name__ == "__main__":
    main(globals())
