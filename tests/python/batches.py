"""`batches` and `adaptive` without PyTorch: what is a row, what comes again, how sizes shrink and grow, what is let go."""

import asyncio
import collections
import gc
import inspect
import os
import random
import sys
import threading
import weakref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main, raises

import unhand
from unhand import _fitting


class Big:
    """Stands for a tensor."""


class Device:
    """Room for so many rows, which may change."""

    def __init__(self, room):
        self.room = room
        self.tried = []
        self.watches = []
        # How many objects of failed attempts were alive when the next attempt began.
        self.alive = []

    def __call__(self, rows):
        self.alive.append(sum(watch() is not None for watch in self.watches))
        n = rows if isinstance(rows, int) else len(rows)
        self.tried.append(n)
        activations = Big()
        activations.itself = [activations]
        if n > self.room:
            self.watches.append(weakref.ref(activations))
            del activations.itself
            raise MemoryError(f"no room for {n}")
        return rows


def check_every_row_once_and_in_order():
    for seed in range(40):
        draw = random.Random(seed)
        n_rows, size = draw.randint(0, 300), draw.randint(1, 100)
        device = Device(draw.randint(1, 120))

        def work(rows):
            if draw.random() < 0.1:
                device.room = draw.randint(1, 120)
            return device(rows)

        for data in (list(range(n_rows)), iter(range(n_rows)), range(n_rows)):
            pieces = unhand.batches(data, size, remember=False)
            assert [row for part in pieces.map(work) for row in part] == list(range(n_rows)), seed
            assert sum(pieces.sizes) == n_rows and max(pieces.sizes, default=0) <= size
        assert not any(device.alive)


def check_a_loop_gets_every_row_once():
    for seed in range(40):
        draw = random.Random(seed)
        device, done = Device(draw.randint(1, 60)), []
        for chunk in unhand.batches(list(range(draw.randint(0, 300))), 50, remember=False):
            with chunk as part:
                device(part)
                done += part
                assert len(part) == len(chunk) and part[0] == chunk.start and part[-1] == chunk.stop - 1
            assert chunk.done == (done[-1:] == part[-1:]), seed
        assert done == list(range(len(done))), seed


def check_a_loop_that_is_left():
    done = []
    for chunk in unhand.batches(list(range(100)), 10, remember=False):
        with chunk as part:
            if part[0] == 30:
                break
            if part[0] == 10:
                continue
            done += part
    assert done == [*range(10), *range(20, 30)]


def check_halves_and_grows_back():
    pieces = unhand.batches(list(range(1000)), 64, remember=False)
    device = Device(20)
    passes = pieces.map(device)
    for _ in range(12):
        next(passes)
    # 64 and 32 were too many, 16 fits; then between 16 and 32.
    assert device.tried[:3] == [64, 32, 16] and 16 < max(pieces.sizes) <= 20, device.tried
    n_failures = pieces.n_failures
    device.room = 1000
    list(passes)
    assert max(pieces.sizes) == 64 and pieces.sizes[-5:-1] == [64] * 4 and pieces.n_failures == n_failures
    device.room = 5
    device.tried.clear()
    list(pieces.map(device))
    assert 4 <= max(pieces.sizes) <= 5


def check_tries_get_rare():
    device = Device(16)
    pieces = unhand.batches(range(200_000), 64, remember=False)
    for _ in pieces.map(device):
        pass
    # 12,500 pieces; it doubles the wait with each failed try.
    assert pieces.n_failures < 60 and sum(pieces.sizes) / len(pieces.sizes) > 15.9, pieces.n_failures


def check_remembered_for_the_line_and_the_shape():
    device = Device(10)

    def go(data, **options):
        device.tried.clear()
        list(unhand.batches(data, 20, **options).map(device))
        return device.tried[0]

    rows = list(range(20))
    assert go(rows) == 20
    assert go(rows) == 10
    # Another kind of rows, another name, nothing remembered.
    assert go(range(20)) == 20
    assert go(rows, remember="mine") == 20 and go(rows, remember="mine") == 10
    assert go(rows, remember=False) == 20 and go(rows, remember=False) == 20
    _fitting.forget()
    assert go(rows) == 20
    _fitting.forget()


def check_the_smallest_does_not_fit():
    device = Device(2)
    pieces = unhand.batches(list(range(40)), 16, min_size=4, remember=False)
    words = raises(MemoryError, lambda: list(pieces.map(device)))
    assert device.tried == [16, 8, 4] and pieces.n_failures == 3 and "no room for 4" in words
    try:
        list(unhand.batches(list(range(40)), 16, remember=False).map(Device(0)))
    except MemoryError as error:
        text = "".join(getattr(error, "__notes__", [])) + str(error)
        assert "with 1 rows" in text and "tried 16, 8, 4, 2, 1" in text and error.__traceback__ is not None
    else:
        raise AssertionError("no error")
    # In a loop the error comes out of the `with`.
    def loop():
        for chunk in unhand.batches([1], 1, remember=False):
            with chunk as part:
                Device(0)(part)
    raises(MemoryError, loop)


def check_other_errors_are_not_touched():
    for error in (KeyboardInterrupt(), SystemExit(3), ValueError("x"), RuntimeError("CUDA error: an illegal memory access")):
        tried = []

        def fail(part):
            tried.append(len(part))
            raise error

        pieces = unhand.batches(list(range(8)), 4, remember=False)
        raises(type(error), lambda: list(pieces.map(fail)))
        assert tried == [4] and pieces.n_failures == 0

        def loop():
            for chunk in pieces:
                with chunk as part:
                    fail(part)

        raises(type(error), loop)
        assert tried == [4, 4]
        call = unhand.adaptive(lambda batch_size: fail([0] * batch_size), start=4)
        raises(type(error), call)
        assert tried == [4, 4, 4]


def check_a_piece_has_to_be_entered():
    def loop():
        for chunk in unhand.batches([1, 2, 3], 1):
            pass

    raises(unhand.Error, loop, "with chunk as part")

    def twice():
        for chunk in unhand.batches([1, 2, 3], 1):
            with chunk:
                pass
            with chunk:
                pass

    raises(unhand.Error, twice, "had its turn")


class Array:
    """An array like NumPy's, as far as it goes."""

    def __init__(self, rows, columns, start=0):
        self.shape, self.dtype, self.start = (rows, columns), "float32", start

    def __getitem__(self, index):
        first, second = index if len(index) == 2 else (index[0], slice(None))
        rows, columns = range(self.shape[0])[first], range(self.shape[1])[second]
        return Array(len(rows), len(columns), (self.start or 0) + rows.start)


def check_what_a_row_is():
    def pieces(data, size=2, **options):
        return list(unhand.batches(data, size, remember=False, **options).map(lambda part: part))

    assert pieces("abc") == ["ab", "c"]
    assert pieces((1, 2, 3)) == [(1, 2), (3,)]
    assert pieces({1: "a", 2: "b", 3: "c"}.keys()) == [[1, 2], [3]]
    assert [part.shape for part in pieces(Array(5, 3))] == [(2, 3), (2, 3), (1, 3)]
    assert [part.shape for part in pieces(Array(5, 3), dim=1)] == [(5, 2), (5, 1)]
    assert [part.shape for part in pieces(Array(5, 3), dim=-1)] == [(5, 2), (5, 1)]
    found = pieces({"x": Array(3, 2), "names": ["a", "b", "c"], "scale": 0.5, "nothing": None})
    assert [(part["x"].shape, part["names"], part["scale"], part["nothing"]) for part in found] == [
        ((2, 2), ["a", "b"], 0.5, None),
        ((1, 2), ["c"], 0.5, None),
    ]
    pair = collections.namedtuple("Pair", "x y")
    found = pieces(pair(Array(3, 2), Array(3, 7)))
    assert type(found[0]) is pair and found[1].y.shape == (1, 7)
    ordered = pieces(collections.OrderedDict(x=Array(3, 2)))
    assert type(ordered[0]) is collections.OrderedDict
    raises(ValueError, lambda: pieces((Array(3, 2), Array(4, 2))), "different numbers of rows: [3, 4]")
    raises(TypeError, lambda: pieces(7), "has no rows")
    raises(ValueError, lambda: unhand.batches([1], 0), "at least 1")
    raises(ValueError, lambda: unhand.batches([1], 4, min_size=0), "at least 1")

    class Dataset:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            if not isinstance(index, int):
                raise TypeError("one at a time")
            return index * 10

    assert pieces(Dataset(), 3) == [[0, 10, 20], [30, 40]]


def check_results_as_one():
    def go(function, data=range(7)):
        return unhand.batches(list(data), 3, remember=False).concat(function)

    assert go(lambda part: [row * 2 for row in part]) == [0, 2, 4, 6, 8, 10, 12]
    assert go(lambda part: ([1] * len(part), part)) == ([1] * 7, [0, 1, 2, 3, 4, 5, 6])
    assert go(lambda part: {"rows": part})["rows"] == [0, 1, 2, 3, 4, 5, 6]
    assert go(lambda part: part, []) == []
    raises(TypeError, lambda: go(sum), "go through them with `map`")


def check_nothing_is_kept():
    watches = []

    def work(part):
        result = Big()
        watches.append(weakref.ref(result))
        return result

    gc.disable()
    try:
        for result in unhand.batches(range(9), 3, remember=False).map(work):
            del result
            # Made only when asked for, and gone at once.
            assert watches[-1]() is None
        assert len(watches) == 3
    finally:
        gc.enable()


def check_streams_do_not_run_ahead():
    pulled = []
    source = (pulled.append(row) or row for row in range(1000))
    passes = unhand.batches(source, 10, remember=False).map(Device(4))
    next(passes)
    assert len(pulled) == 10
    next(passes)
    assert len(pulled) == 10


def check_adaptive():
    device = Device(20)

    @unhand.adaptive(start=64)
    def train(model, batch_size, rate=1, *rest, **more):
        "Trains."
        device(batch_size)
        return model, batch_size, rate, rest, more

    assert train("m") == ("m", 16, 1, (), {}) and device.tried == [64, 32, 16]
    assert train(model="m", rate=3) == ("m", 16, 3, (), {})
    assert train("m", 2, 7, 8, batch_size=5, extra=1) == ("m", 5, 2, (7, 8), {"extra": 1})
    assert train.__doc__ == "Trains." and train.__name__ == "train" and train.__wrapped__ is not None
    assert list(inspect.signature(train).parameters) == ["model", "rate", "rest", "batch_size", "more"]
    for _ in range(40):
        train("m")
    assert max(device.tried[-20:]) <= 24 and train("m")[1] >= 18
    device.room = 100
    for _ in range(200):
        train("m")
    assert train("m")[1] == 64
    train.forget()
    device.room = 2
    assert train("m")[1] == 2 and not any(device.alive)
    device.room = 0
    raises(MemoryError, lambda: train("m"), "no room for 1")


def check_adaptive_finds_the_parameter():
    def size_first(size, other="o"):
        return size, other

    assert unhand.adaptive(size_first, start=3)("x") == (3, "x")
    assert unhand.adaptive(start=3, parameter="other")(size_first)(1) == (1, 3)
    # Its own default is where it begins.
    assert unhand.adaptive(lambda x, batch_size=9: batch_size)(1) == 9

    def by_keyword(*, batch_size):
        return batch_size

    assert unhand.adaptive(by_keyword, start=2)() == 2

    class Trainer:
        @unhand.adaptive(start=8)
        def run(self, size, x=0):
            return type(self), size, x

        @staticmethod
        @unhand.adaptive(start=8)
        def fixed(size):
            return size

        @classmethod
        @unhand.adaptive(start=8)
        def made(cls, size):
            return cls, size

    assert Trainer().run(x=1) == (Trainer, 8, 1) and Trainer().run(1, size=4) == (Trainer, 4, 1)
    assert Trainer.fixed() == 8 and Trainer.made() == (Trainer, 8)
    raises(TypeError, lambda: unhand.adaptive(lambda: 1), "has no parameter")
    raises(TypeError, lambda: unhand.adaptive(lambda x: 1, parameter="y"), "has no parameter y")
    raises(TypeError, lambda: unhand.adaptive(32), "decorates a function")
    raises(ValueError, lambda: unhand.adaptive(lambda x: 1, start=0), "at least 1")
    raises(TypeError, lambda: unhand.adaptive(lambda x: 1)(), "no size to begin with")

    def generator(size):
        yield size

    raises(TypeError, lambda: unhand.adaptive(generator, start=2), "generator")


def check_adaptive_options():
    device = Device(10)
    call = unhand.adaptive(lambda batch_size: device(batch_size), start=64, shrink=lambda n: n - 20, grow=False)
    assert call() == 4 and device.tried == [64, 44, 24, 4]
    for _ in range(50):
        assert call() == 4
    device = Device(10)
    raises(MemoryError, unhand.adaptive(lambda batch_size: device(batch_size), start=64, min=16))
    assert device.tried == [64, 32, 16]
    # What does not shrink would be tried for ever.
    device = Device(10)
    assert unhand.adaptive(lambda batch_size: device(batch_size), start=12, shrink=lambda n: n)() == 10


def check_adaptive_coroutines():
    device = Device(10)

    @unhand.adaptive(start=32)
    async def work(batch_size):
        await asyncio.sleep(0)
        return device(batch_size)

    async def both():
        return await asyncio.gather(work(), work())

    assert inspect.iscoroutinefunction(work)
    assert asyncio.run(both()) == [8, 8] and not any(device.alive)

    async def cancelled():
        task = asyncio.create_task(unhand.adaptive(forever, start=2)())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    async def forever(size):
        await asyncio.sleep(60)

    assert asyncio.run(cancelled())


def check_threads_share_a_size():
    failures, rooms = [], threading.local()

    @unhand.adaptive(start=64)
    def call(batch_size):
        if batch_size > 10:
            raise MemoryError
        return batch_size

    def work():
        try:
            for _ in range(200):
                assert 1 <= call() <= 10
            done = [row for part in unhand.batches(range(500), 32, remember="shared").map(Device(7)) for row in part]
            assert done == list(range(500))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del rooms
    assert not failures, failures


def check_the_caller_s_handler_keeps_its_error():
    try:
        raise KeyError("outer")
    except KeyError as outer:
        list(unhand.batches(range(8), 8, remember=False).map(Device(3)))
        assert sys.exc_info()[1] is outer and outer.__traceback__ is not None


def check_nothing_is_imported():
    assert "torch" not in sys.modules and "numpy" not in sys.modules


if __name__ == "__main__":
    main(globals())
