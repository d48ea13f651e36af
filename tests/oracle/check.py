#!/usr/bin/env python3
"""Assert documented facts of the allocator on every built release: does the oracle itself work and still say so?

usage: check.py [VERSION ...]

Each check is a function taking `play` (run a script, get its answers) and the release as a tuple; it asserts
what that release does. A failure means that the oracle, the fake runtime or our idea of PyTorch is wrong.
"""

import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Answers(list):
    """Answers to the commands of one script, with readers for the structured ones."""

    def stats(self, at=-1):
        return {k: int(v) for k, v in (pair.split("=") for pair in self[at].split())}

    def trace(self, at=-1):
        return [] if self[at] == "none" else [e.split(":")[0] for e in self[at].split()]

    def entries(self, at=-1):
        """(action, address, size, stream, pool) of a trace answer."""
        rows = [] if self[at] == "none" else [e.split(":") for e in self[at].split()]
        return [(r[0], int(r[1], 16), int(r[2]), int(r[3]), int(r[5])) for r in rows]

    def segments(self, at=-1):
        """[(address, total, [(state, size)])] of a snapshot answer."""
        result = []
        for part in self[at].split(";")[1:]:
            words = part.split()
            blocks = [(b.split(",")[0], int(b.split(",")[1])) for b in words[11:]]
            result.append((int(words[1], 16), int(words[2]), blocks))
        return result

    def addr(self, at):
        return int(self[at], 16)


class Oracle:
    def __init__(self, version):
        self.process = subprocess.Popen([os.path.join(HERE, "build", version, "driver")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def play(self, *commands, total=80 * MIB, conf=""):
        """Run a script; numbers in commands may be written like `20M`, `3k`, `1M+1`."""
        lines = [f"init total={total} conf={conf}"] + [expand(c) for c in commands]
        self.process.stdin.write("\n".join(lines) + "\nend\n")
        self.process.stdin.flush()
        answers = Answers(self.process.stdout.readline().rstrip("\n") for _ in range(len(lines) + 1))
        assert answers[-1] == "bye", f"the driver said {answers[-1]!r}"
        assert answers[0] == "ok", answers[0]
        return Answers(answers[1:-1])


def expand(command):
    words = command.split()
    if words[0] == "malloc":
        words[2] = str(eval(words[2].replace("M", "*1048576").replace("k", "*1024")))  # our own literals
        words += ["0"] if len(words) == 3 else []
    return " ".join(words)


@check
def sizes_and_segments(play, version):
    a = play("malloc 1 1", "malloc 2 1M", "malloc 3 1M+1", "malloc 4 10M-1", "malloc 5 10M+1", "malloc 6 0",
             "snapshot", total=1 << 30)
    by_size = sorted(s[1] // MIB for s in a.segments())
    # 1 B and 1 MiB share a 2 MiB segment; 1 MiB + 512 opens a 20 MiB one, into which 10 MiB fits as well.
    assert by_size == [2, 12, 20], by_size
    assert a.addr(5) == 0  # nothing is allocated for no bytes


@check
def split_is_strict_at_one_mib(play, version):
    a = play("malloc 1 20M", "free 1", "malloc 2 19M", "snapshot")
    assert a.segments()[0][2] == [("a", 20 * MIB)]
    a = play("malloc 1 20M", "free 1", "malloc 2 19M-512", "snapshot")
    assert a.segments()[0][2] == [("a", 19 * MIB - 512), ("i", MIB + 512)]


@check
def ties_go_to_age_since_2_12(play, version):
    a = play("malloc 1 20M", "malloc 2 20M", "free 2", "empty_cache", "malloc 3 20M", "free 1", "free 3",
             "malloc 4 20M")
    first, second, third, fourth = (a.addr(i) for i in (0, 1, 4, 7))
    # New places go downwards and the freed one is handed out again: the third block is low and young.
    assert third == second < first
    assert fourth == (first if version >= (2, 12) else third)


@check
def fraction_is_rounded_since_2_13(play, version):
    a = play("fraction 0.7", "malloc 1 60M", "last_error", total=64 * MIB)
    assert a[1] == "oom"
    # 0.7 * 64 MiB = 46976204.8; the message says 44.80 MiB either way, so look at the limit by allocating at it.
    total = 30 * MIB
    # fraction * total = 20 MiB - 0.4 (rounds to 20 MiB, truncates to one byte less)
    fraction = (20 * MIB - 0.4) / total
    a = play(f"fraction {fraction:.17g}", "malloc 1 20M", total=total)
    assert (a[1] != "oom") == (version >= (2, 13)), a


@check
def oom_after_event_sync_is_spurious(play, version):
    script = ["malloc 1 40M", "malloc 2 40M", "free 1", "malloc 3 10M", "malloc 4 30M-2M", "record_stream 4 0x10",
              "busy 0x10", "free 4", "malloc 5 20M", "malloc 6 20M"]
    a = play(*script)
    assert a[-2] == "oom" and a[-1].startswith("0x"), a


@check
def split_segment_is_not_released(play, version):
    a = play("malloc 1 1000", "malloc 2 20M", "free 2", "empty_cache", "trace_since", "snapshot")
    assert a.trace(4) == ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
                          "segment_free"]
    assert a.segments()[0][2] == [("a", 1024), ("i", 2 * MIB - 1024)]


@check
def gc_releases_old_blocks_in_set_order(play, version):
    a = play("fraction 0.5", "malloc 1 20M", "malloc 2 12M", "malloc 3 22M", "free 1", "free 2", "free 3",
             "malloc 4 30M", "free 4", "trace_since", "malloc 5 40M", "trace_since",
             total=240 * MIB, conf="garbage_collection_threshold:0.5")
    freed = [(e[0], e[2] // MIB) for e in a.entries() if e[0] == "segment_free"]
    # Over 60 MiB; the oldest go, smallest first, the younger 30 MiB block stays.
    assert freed == [("segment_free", 12), ("segment_free", 20), ("segment_free", 22)], freed


@check
def max_split_releases_the_largest_first(play, version):
    a = play("malloc 1 36M", "malloc 2 40M", "malloc 3 44M", "free 1", "free 2", "free 3", "trace_since", "malloc 4 45M",
             "trace_since", total=124 * MIB, conf="max_split_size_mb:30")
    freed = [e[2] // MIB for e in a.entries() if e[0] == "segment_free"]
    assert freed == [44, 40], freed


@check
def use_on_oom_comes_before_freeing_since_2_11(play, version):
    a = play("pool_create 1 use_on_oom", "pool_begin 1", "malloc 1 20M", "pool_end 1", "free 1", "malloc 2 12M",
             "free 2", "malloc 3 20M", "trace_since", total=36 * MIB)
    assert a[7].startswith("0x")
    assert ("segment_free" in a.trace()) == (version < (2, 11)), a


@check
def no_split_takes_whole_segments(play, version):
    if version < (2, 10):
        return
    a = play("pool_create 1 no_split", "pool_begin 1", "malloc 1 100", "stats", "malloc 2 100", "pool_end 1", "snapshot")
    assert a.stats(3)["allocated_bytes.all.current"] == 2 * MIB
    assert len(a.segments()) == 2
    a = play("pool_create 1 no_split", "pool_begin 1", "pool_end 1", "pool_release 1", "pool_release 1", "empty_cache",
             "pool_create 1", "pool_begin 1", "malloc 1 100", "pool_end 1", "snapshot")
    sticky = a.segments()[0][2] == [("a", 2 * MIB)]
    assert sticky == (version < (2, 14)), a


@check
def diversion_is_not_capture_since_2_13(play, version):
    a = play("malloc 1 60M", "free 1", "pool_create 1", "pool_begin 1", "malloc 2 60M", "pool_end 1")
    assert (a[4] == "oom") == (version < (2, 13))
    a = play("malloc 1 60M", "free 1", "pool_create 1", "pool_begin 1", "empty_cache", "pool_end 1", "stats")
    left = a.stats()["reserved_bytes.all.current"]
    assert left == (60 * MIB if version < (2, 13) else 0)


@check
def capture_defers_frees(play, version):
    a = play("malloc 1 20M", "pool_create 1:0", "pool_begin 1:0", "capture_begin 0 5", "malloc 2 20M",
             "record_stream 2 0x10", "trace_since", "free 2", "trace_since", "capture_end 0", "pool_end 1:0",
             "trace_since", "malloc 3 1000", "trace_since")
    assert a.trace(8) == ["free_requested"]
    assert a.trace(11) == []
    assert a.trace(13)[0] == "free_completed"


@check
def expandable_grows_by_pages(play, version):
    a = play("malloc 1 5M", "malloc 2 30M", "trace_since", "free 1", "malloc 3 1M+1", "driver_calls", "snapshot",
             total=200 * MIB, conf="expandable_segments:True")
    maps = [e[2] // MIB for e in a.entries(2) if e[0] == "segment_map"]
    assert maps == [20, 20] and a.addr(1) == a.addr(0) + 5 * MIB
    assert a.addr(0) == 0x200000000 == a.addr(4)
    assert "map=2 " in a[5] and a.segments()[0][1] == 40 * MIB
    a = play("malloc 1 1000", "malloc 2 60M", "free 2", "empty_cache", "trace_since", "stats", total=200 * MIB,
             conf="expandable_segments:True")
    assert a.entries(4)[-1][0] == "segment_unmap" and a.stats()["segment.all.allocated"] == 0


@check
def expandable_oom_keeps_what_was_mapped(play, version):
    a = play("malloc 1 70M", "malloc 2 5M", "malloc 3 20M", "stats", conf="expandable_segments:True", total=90 * MIB)
    assert a[2] == "oom"
    assert a.stats()["num_ooms"] == 1


@check
def roundup_tables(play, version):
    a = play("malloc 1 1200", "malloc 2 5000", "malloc 3 17M", "malloc 4 100M+1", "stats", "snapshot", total=1 << 30,
             conf="roundup_power2_divisions:8")
    sizes = sorted(size for s in a.segments() for state, size in s[2] if state == "a")
    assert sizes == [1536, 5120, 18 * MIB, 104 * MIB], sizes
    cfg = play("snapshot", conf="roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")[0].split(";")[0].split()
    new = ["1"] * 9 + ["2", "4"] + ["8"] * 5
    old = ["1"] * 9 + ["2"] + ["8"] * 6
    assert cfg[4:] == (new if version >= (2, 10) else old), cfg


@check
def settings_errors(play, version):
    a = play("settings nonsense:1", "settings max_split_size_mb:19", "settings max_split_size_mb:20",
             "settings garbage_collection_threshold:1", "settings roundup_power2_divisions:3",
             "settings max_split_size_mb:x")
    if version >= (2, 10):
        assert a[0].startswith("error ValueError Unrecognized key"), a[0]
    else:
        assert a[0].startswith("error RuntimeError Unrecognized CachingAllocator option"), a[0]
    assert a[1].startswith("error")
    assert (a[2] == "ok") == (version >= (2, 10)), a[2]
    assert all(x.startswith("error") for x in a[3:]), a[3:]


@check
def settings_apply_up_to_the_error(play, version):
    a = play("settings max_split_size_mb:64,nonsense:1", "snapshot")
    if version >= (2, 10):
        assert a[1].startswith(f"cfg {64 * MIB} "), a[1]


@check
def history_ring_is_not_chronological_after_resize(play, version):
    a = play("history 4", "malloc 1 1000", "malloc 2 1000", "free 1", "history 8", "malloc 3 1000", "malloc 4 1000",
             "history_show", "history 0")
    assert len(a.trace(7)) > 4
    a = play("history 3", "malloc 1 1000", "malloc 2 1000", "malloc 3 1000", "history_show")
    assert a.trace(4) == ["alloc", "alloc", "alloc"]


@check
def statistics_are_complete(play, version):
    a = play("malloc 1 1000", "free 1", "reset_accumulated", "reset_peak", "stats")
    stats = a.stats()
    assert len(stats) == (123 if version >= (2, 12) else 122), len(stats)
    assert stats["max_split_size"] == -1 and stats["allocation.all.allocated"] == 0
    assert stats["reserved_bytes.all.peak"] == stats["reserved_bytes.all.current"] == 2 * MIB


@check
def fake_driver_placement(play, version):
    a = play("malloc 1 40M", "malloc 2 20M", "malloc 3 30M", "free 1", "empty_cache", "malloc 4 64M", "malloc 5 36M",
             total=1 << 30)
    top = 0x7F0000000000
    assert a.addr(0) == top - 64 * MIB
    assert a.addr(1) == top - 64 * MIB + 40 * MIB  # first fit inside the first chunk
    assert a.addr(2) == top - 96 * MIB
    assert a.addr(5) == top - 160 * MIB and a.addr(6) == top - 64 * MIB


def release(version):
    return tuple(int(n) for n in re.findall(r"\d+", version))


def main():
    build = os.path.join(HERE, "build")
    there = sorted(os.listdir(build), key=release) if os.path.isdir(build) else []
    versions = sys.argv[1:] or [v for v in there if os.path.exists(os.path.join(build, v, "driver"))]
    if not versions:
        raise SystemExit("check.py: nothing built; run fetch.py, then build.py")
    failed = 0
    for version in versions:
        numbers = release(version)
        for function in CHECKS:
            oracle = Oracle(version)
            try:
                function(oracle.play, numbers)
            except AssertionError as error:
                failed += 1
                line = error.__traceback__.tb_next.tb_lineno
                print(f"torch {version}: {function.__name__} (line {line}): {str(error)[:600]}")
            finally:
                oracle.process.stdin.close()
                oracle.process.wait()
        print(f"torch {version}: {len(CHECKS)} checks")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
