"""Which blocks were born since a mark: told exactly, whoever else records, and told to be unknown where it is."""

import os
import random
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import torch
from bench import main

from unhand import _births, _counters

KIB = 1 << 10
RECORD = torch.cuda.memory._record_memory_history
CAN_SIGN = hasattr(torch._C, "_cuda_setMemoryMetadata")


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8, device="cuda")


def born(mark, **options):
    """The sizes in KiB of what was born, and whether that is all."""
    found = _births.survivors(mark, **options)
    return [birth.bytes // KIB for birth in found.births], found.is_exact


def is_recording():
    return torch._C._cuda_isHistoryEnabled()


def check_before_cuda_is_started_a_mark_costs_nothing():
    assert not torch.cuda.is_initialized() and _counters.read(0) is None
    with _births.mark() as mark:
        assert not torch.cuda.is_initialized() and born(mark) == ([], True)
        kept = block(1)
        assert born(mark) == ([1], True), "everything is younger than the mark"
    del kept


def check_counters_are_pytorch_s_own():
    kept = [block(n) for n in (1, 3, 5000)]
    block(9)
    figures, stats = _counters.read(0), torch.cuda.memory_stats(0)
    names = {
        "allocated_bytes": "allocated_bytes.all.current", "requested_bytes": "requested_bytes.all.current",
        "reserved_bytes": "reserved_bytes.all.current", "active_bytes": "active_bytes.all.current",
        "handed_out_bytes": "allocated_bytes.all.allocated", "peak_allocated_bytes": "allocated_bytes.all.peak",
        "peak_requested_bytes": "requested_bytes.all.peak", "peak_reserved_bytes": "reserved_bytes.all.peak",
        "n_live": "allocation.all.current", "n_allocations": "allocation.all.allocated", "n_frees": "allocation.all.freed",
        "n_segments": "segment.all.current", "n_ooms": "num_ooms", "n_retries": "num_alloc_retries",
    }
    assert {*names, "device"} == set(_counters.Counters._fields)
    for name, theirs in names.items():
        assert getattr(figures, name) == stats[theirs], name
    del kept


def check_an_equal_block_at_the_same_address_is_younger():
    old = block(700)
    address = old.data_ptr()
    with _births.mark() as mark:
        del old
        new = block(700)
        assert new.data_ptr() == address
        assert born(mark) == ([700], True)
    del new


def check_random_programs_have_the_survivors_of_a_plain_model():
    for seed in range(12):
        draw = random.Random(seed)
        alive, marks, n_births = {}, [], 0
        for _ in range(draw.randrange(5, 250)):
            action = draw.random()
            if action < 0.55 or not alive:
                alive[n_births] = block(draw.choice([1, 2, 4, 600, 5000, 30000]))
                n_births += 1
            elif action < 0.9:
                del alive[draw.choice(list(alive))]
            elif action < 0.95 and len(marks) < 4:
                marks.append((_births.mark(), n_births))
            elif marks:
                mark, n_then = marks[draw.randrange(len(marks))]
                expected = [alive[n].data_ptr() for n in sorted(alive) if n >= n_then]
                found = _births.survivors(mark)
                assert found.is_exact and [birth.address for birth in found.births] == expected, (seed, found)
        for mark, _ in marks:
            mark.close()
        assert not is_recording()


def check_the_record_is_on_while_a_mark_is_open():
    functions = [getattr(torch._C, name, None) for name in _births._NAMES]
    block(1)
    one = _births.mark()
    two = _births.mark()
    assert is_recording()
    one.close()
    one.close()
    assert is_recording(), "the other one is open"
    two.close()
    assert not is_recording()
    assert [getattr(torch._C, name, None) for name in _births._NAMES] == functions
    assert not torch.cuda.memory._snapshot()["device_traces"][0]


def check_a_recording_of_the_user_s_is_left_alone():
    RECORD(max_entries=1000)
    before = block(1)
    with _births.mark() as mark:
        kept = block(2)
        assert born(mark) == ([2], True)
        birth, = _births.survivors(mark).births
        assert any(frame["name"] == "check_a_recording_of_the_user_s_is_left_alone" for frame in birth.frames)
    assert is_recording()
    trace = [entry["size"] for entry in torch.cuda.memory._snapshot()["device_traces"][0] if entry["action"] == "alloc"]
    assert trace[-2:] == [KIB, 2 * KIB] and not any(
        entry.get("user_metadata") for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    )
    RECORD(None)
    del before, kept


def check_a_recording_may_begin_and_end_inside():
    block(1)
    with _births.mark() as mark:
        kept = [block(1)]
        RECORD(max_entries=1000)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert not any(entry["action"] == "alloc" for entry in trace), "theirs begins empty"
        kept.append(block(2))
        assert born(mark) == ([1, 2], True)
        RECORD(None)
        kept.append(block(3))
        assert is_recording() and born(mark) == ([1, 2, 3], True)
        RECORD(max_entries=1000)
        kept.append(block(4))
        assert born(mark) == ([1, 2, 3, 4], True)
    assert is_recording(), "theirs goes on"
    RECORD(None)
    assert not is_recording()


def check_a_record_that_is_overrun_says_so():
    older = block(1)
    RECORD(max_entries=5)
    with _births.mark() as mark:
        kept = block(2)
        for _ in range(10):
            block(1)
        last = block(3)
        found = _births.survivors(mark)
        assert [birth.bytes // KIB for birth in found.births] == [3] and not found.is_exact, found
        assert found.n_unknown >= 9 and "record" in found.why
    RECORD(None)
    del older, kept, last


def check_sums_that_were_reset_are_noticed():
    older = block(1)
    with _births.mark() as mark:
        kept = block(2)
        torch.cuda.reset_accumulated_memory_stats()
        found = _births.survivors(mark)
        assert not found.is_exact and "reset" in found.why and not found.births, found
    del older, kept


def check_spans_are_ranges_of_numbers():
    older = block(1)
    with _births.mark() as mark:
        kept = [block(2)]
        start = _counters.read(0).n_allocations
        kept.append(block(3))
        end = _counters.read(0).n_allocations
        kept.append(block(4))
        assert born(mark, spans={0: [(start, end)]}) == ([3], True)
        assert born(mark, spans={}) == ([], True)
    del older, kept


def check_a_birth_knows_its_thread():
    if not CAN_SIGN:
        return
    older, kept = block(1), {}
    with _births.mark() as mark:
        kept["main"] = block(2)

        def with_a_mark():
            with _births.mark():
                kept["marked"] = block(3)

        def without():
            kept["plain"] = block(4)

        idents = []
        for work in (with_a_mark, without):
            thread = threading.Thread(target=work)
            thread.start()
            idents.append(thread.ident)
            thread.join()
        births = _births.survivors(mark).births
        assert [birth.thread for birth in births] == [threading.get_ident(), idents[0], None], births
    assert torch._C._cuda_getMemoryMetadata() == ""
    torch._C._cuda_setMemoryMetadata("mine")
    with _births.mark():
        assert torch._C._cuda_getMemoryMetadata() == "mine"
    assert torch._C._cuda_getMemoryMetadata() == "mine"
    torch._C._cuda_setMemoryMetadata("")
    del older


def check_marks_of_many_threads_do_not_disturb_each_other():
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(20):
            with _births.mark():
                kept = [block(draw.choice([1, 2, 700])) for _ in range(draw.randrange(8))]
                if not is_recording():
                    wrong.append("off")
            del kept

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not is_recording() and _births._recording.n_marks == 0


if __name__ == "__main__":
    main(globals())
