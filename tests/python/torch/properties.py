"""Random programs of allocations, views, steps, `free` and uses of what was freed: nothing breaks and nothing is lost.

A program is a list of operations on a few slots. After each one every tensor that was not freed has the value it should
have, every freed one raises an ordinary exception, and the allocator works. A failing program shrinks.
"""

import gc
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import unhand

N_SLOTS = 5
KIB = 1 << 10


class Program:
    """Slots with tensors whose values are known."""

    def __init__(self):
        self.slots = [None] * N_SLOTS
        self.values = [None] * N_SLOTS
        """What a slot's tensor must hold; None for an empty slot and `freed` for a freed one."""
        self.counter = 0

    def new(self, slot, kib):
        self.counter += 1
        # Copied, because the stand-in computes no fill over 1 MiB.
        self.slots[slot] = torch.full((kib * KIB // 4,), float(self.counter)).cuda()
        self.values[slot] = float(self.counter)

    def view(self, slot, other):
        if isinstance(self.values[slot], float):
            self.slots[other] = self.slots[slot][:64]
            self.values[other] = self.values[slot]

    def alias(self, slot, other):
        if self.slots[slot] is not None:
            self.slots[other], self.values[other] = self.slots[slot], self.values[slot]

    def drop(self, slot):
        self.slots[slot] = self.values[slot] = None

    def parameter(self, slot, kib):
        self.new(slot, kib)
        self.slots[slot] = nn.Parameter(self.slots[slot])

    def fill(self, slot):
        if isinstance(self.values[slot], float):
            self.counter += 1
            address = self.storage(slot)
            self.slots[slot].detach().copy_(torch.full(self.slots[slot].shape, float(self.counter)))
            whole = self.slots[slot].numel() * 4 == self.slots[slot].untyped_storage().nbytes()
            for other in range(N_SLOTS):
                if isinstance(self.values[other], float) and self.storage(other) == address:
                    # A view begins where its whole begins, so whoever shares the storage shares its first value.
                    self.values[other] = float(self.counter) if whole or self.slots[other].numel() == 64 else None
            self.values[slot] = float(self.counter)
            for other in range(N_SLOTS):
                if self.values[other] is None:
                    self.slots[other] = None

    def storage(self, slot):
        return torch._C._storage_address(self.slots[slot])

    def free(self, slots, shared):
        things = [self.slots[slot] for slot in slots if self.slots[slot] is not None]
        named = {id(thing) for thing in things}
        storages = {torch._C._storage_address(thing) for thing in things}
        outside = {
            self.storage(slot)
            for slot in range(N_SLOTS)
            if isinstance(self.values[slot], float) and id(self.slots[slot]) not in named
        }
        gone = storages if shared else storages - outside
        freed = unhand.free(*things, shared=shared)
        assert all(holder.bytes > 0 for holder in freed.shared)
        for slot in range(N_SLOTS):
            if self.slots[slot] is not None and self.storage(slot) in gone:
                self.values[slot] = "freed"

    def graph(self, slot, other):
        if isinstance(self.values[slot], float) and slot != other:
            source = self.slots[slot].detach().requires_grad_()
            self.slots[other] = source.clone()
            self.values[other] = self.values[slot]

    def collect(self):
        unhand.free()

    def compact(self):
        unhand.compact()

    def check(self):
        for slot, value in enumerate(self.values):
            tensor = self.slots[slot]
            if value == "freed":
                for use in (lambda: tensor.cpu(), lambda: tensor + 1, lambda: tensor.detach().zero_()):
                    try:
                        use()
                    except RuntimeError as error:
                        assert "unhand" in str(error), error
                    else:
                        raise AssertionError(f"slot {slot} was freed and can be used")
                assert "freed" in repr(tensor) or type(tensor) is torch.Tensor
            elif value is not None:
                host = tensor.detach().cpu()
                assert (host == value).all(), f"slot {slot} holds {host.unique()}, not {value}"
        fresh = torch.full((1024,), 3.0, device="cuda").cpu()
        assert (fresh == 3.0).all()
        torch.cuda.synchronize()


slot = st.integers(0, N_SLOTS - 1)
kib = st.sampled_from([4, 300, 1100, 3000, 12_000])
operation = st.one_of(
    st.tuples(st.just("new"), slot, kib),
    st.tuples(st.just("parameter"), slot, kib),
    st.tuples(st.just("view"), slot, slot),
    st.tuples(st.just("alias"), slot, slot),
    st.tuples(st.just("graph"), slot, slot),
    st.tuples(st.just("drop"), slot),
    st.tuples(st.just("fill"), slot),
    st.tuples(st.just("free"), st.lists(slot, min_size=1, max_size=3, unique=True), st.booleans()),
    st.tuples(st.just("collect")),
    st.tuples(st.just("compact")),
)


@settings(max_examples=6, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(operation, min_size=4, max_size=14))
def run(operations):
    program = Program()
    for name, *arguments in operations:
        getattr(program, name)(*arguments)
        program.check()
    # What no slot holds is gone, and the allocator says so.
    program.slots = [None] * N_SLOTS
    gc.collect()
    unhand.free()
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0, stats["allocated_bytes.all.current"]
    assert stats["reserved_bytes.all.current"] == 0, stats["reserved_bytes.all.current"]


def check_random_programs():
    run()


if __name__ == "__main__":
    main(globals())
