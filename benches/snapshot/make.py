"""Writes a synthetic snapshot: N events of a training-like run, each with a stack of about 65 frames.

    python3 make.py 1000000 big.pickle

The pickle is written piece by piece, so that files larger than memory can be made: frames are pickled once and
referred to by number after that, as Python's own pickler does.
"""

import random
import struct
import sys

SIZES = [1 << shift for shift in (9, 10, 12, 16, 18, 20, 22, 24, 26)]


class Pickle:
    """The few opcodes of protocol 4 a snapshot needs."""

    def __init__(self, file):
        self.file, self.parts, self.memo, self.n_memo = file, [b"\x80\x04"], {}, 0

    def put(self, data):
        self.parts.append(data)
        if len(self.parts) > 100_000:
            self.flush()

    def flush(self):
        self.file.write(b"".join(self.parts))
        self.parts.clear()

    def remember(self):
        self.put(b"\x94")
        self.n_memo += 1
        return self.n_memo - 1

    def get(self, place):
        self.put(b"h" + bytes((place,)) if place < 256 else b"j" + struct.pack("<I", place))

    def once(self, key, write):
        """Refers to what has this key, writing it at the first time."""
        place = self.memo.get(key)
        if place is not None:
            self.get(place)
        else:
            self.memo[key] = write()

    def text(self, value):
        def write():
            data = value.encode()
            self.put(b"\x8c" + bytes((len(data),)) + data)
            return self.remember()

        self.once(value, write)

    def number(self, value):
        if 0 <= value < 256:
            self.put(b"K" + bytes((value,)))
        elif 0 <= value < 1 << 16:
            self.put(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.put(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.put(b"\x8a" + bytes((len(data),)) + data)

    def begin(self, opcode):
        self.put(opcode)
        place = self.remember()
        self.put(b"(")
        return place

    def pairs(self, **values):
        for key, value in values.items():
            self.text(key)
            {int: self.number, str: self.text}.get(type(value), lambda write: write())(value)


def make(n_events, path, seed=1):
    rng = random.Random(seed)
    frames = [(f"function_{i % 400}", f"/site-packages/torch/nn/modules/module_{i % 90}.py", i * 37 % 1900) for i in range(1500)]
    trunks = [rng.choices(range(1500), k=65) for _ in range(600)]
    with open(path, "wb") as file:
        out = Pickle(file)

        def frame(index):
            def write():
                place = out.begin(b"}")
                name, filename, line = frames[index]
                out.pairs(name=name, filename=filename, line=line)
                out.put(b"u")
                return place

            out.once(index, write)

        def new_stack():
            trunk, n_own = rng.choice(trunks), rng.randrange(4, 12)
            return rng.choices(range(1500), k=n_own) + trunk[n_own:]

        def stack(indices):
            place = out.begin(b"]")
            for index in indices:
                frame(index)
            out.put(b"e")
            return place

        def zero_pair():
            def write():
                out.put(b"K\0K\0\x86")
                return out.remember()

            out.once((0, 0), write)

        def event(action, addr, size, time_us, frames):
            out.begin(b"}")
            out.pairs(action=action, addr=addr, size=size, stream=0, time_us=time_us, compile_context="N/A",
                      user_metadata="", pool_id=zero_pair, frames=frames)
            out.put(b"u")

        out.begin(b"}")
        out.text("device_traces")
        out.begin(b"]")
        out.begin(b"]")
        live, n, time_us, end, draining = [], 0, 1_700_000_000_000_000, 0x7F00_0000_0000, False
        while n < n_events:
            time_us += rng.randrange(1, 40)
            draining = len(live) >= 3000 or (draining and len(live) > 300)
            indices = new_stack()
            if live and rng.random() < (0.85 if draining else 0.38):
                addr, size, _ = live.pop(-1 if rng.random() < 0.8 else rng.randrange(len(live)))
                places = []
                event("free_requested", addr, size, time_us, lambda: places.append(stack(indices)))
                event("free_completed", addr, size, time_us + 1, lambda: out.get(places[0]))
                n += 2
            else:
                size = rng.choice(SIZES)
                places = []
                event("alloc", end, size, time_us, lambda: places.append(stack(indices)))
                live.append((end, size, places[0]))
                end += size
                n += 1
            if n % 1000 < 2:
                out.put(b"e(")
        out.put(b"ee")
        out.text("segments")
        out.begin(b"]")
        out.begin(b"}")
        total, start = sum(size for _, size, _ in live), 0x7F00_0000_0000
        out.pairs(device=0, address=start, total_size=end - start, allocated_size=total, active_size=total,
                  requested_size=total, stream=0, segment_type="large", segment_pool_id=zero_pair,
                  is_expandable=lambda: out.put(b"\x89"), frames=lambda: out.put(b"]"))
        out.text("blocks")
        out.begin(b"]")
        at = start
        for addr, size, place in sorted(live) + [(end, 0, None)]:
            if addr > at:
                out.begin(b"}")
                out.pairs(address=at, size=addr - at, requested_size=0, state="inactive", frames=lambda: out.put(b"]"))
                out.put(b"u")
            if size:
                out.begin(b"}")
                out.pairs(address=addr, size=size, requested_size=size, state="active_allocated",
                          frames=lambda: out.get(place))
                out.put(b"u")
            at = addr + size
        out.put(b"eue")
        out.text("allocator_settings")
        out.put(b"}")
        out.text("external_annotations")
        out.put(b"]u.")
        out.flush()
    print(f"{path}: {n} events, {len(live)} live blocks")


if __name__ == "__main__":
    make(int(sys.argv[1]), sys.argv[2])
