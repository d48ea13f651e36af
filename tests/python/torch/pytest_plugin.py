"""The pytest plugin under the real pytest: limits, leaks, fixtures, what the section at the end says.

Each check runs pytest in this process, on a file of its own: `import torch` is what costs time.
"""
# packages: pytest

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from _sessions import FOLDER, MIB, passes, run
from bench import main


# Limits


def check_a_limit_is_the_peak_above_the_beginning():
    floor = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    ran = run("""
        before = None
        @pytest.mark.limit_gpu("64 MiB")
        def test_just_fits():
            a = big(40); b = big(24)
        @pytest.mark.limit_gpu("64 MiB")
        def test_one_too_many():
            a = big(40); b = big(24); c = big(1)
        @pytest.mark.limit_gpu("64 MiB")
        def test_one_after_the_other():
            for _ in range(20):
                big(60)
        @pytest.mark.limit_gpu(5 * MIB)
        class TestAll:
            def test_of_a_class(self):
                self.x = big(6)
    """)
    passes(ran, "test_just_fits", "test_one_after_the_other")
    assert ran.outcomes["test_one_too_many", "call"] == "failed", ran.text
    words = ran.words["test_one_too_many"]
    assert "had 65.0 MiB of GPU memory allocated at its peak on cuda:0, 1.0 MiB over its limit of 64.0 MiB" in words, words
    assert "65.0 MiB  test_session" in words and "big()  (3 blocks)" in words, words
    assert ran.outcomes["TestAll::test_of_a_class", "call"] == "failed" and ran.code == 1
    peak = ran.figures["test_one_too_many"]["peaks"][0]
    assert peak["allocated_bytes"] == 65 * MIB and peak["is_exact"], peak
    del floor


def check_peaks_are_exact_whatever_the_test_does_to_the_counters():
    before = torch.cuda.max_memory_allocated()
    source = """
        def test_resets():
            a = big(500); del a
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
            b = big(10)
        def test_resets_twice():
            a = big(20); del a
            torch.cuda.reset_peak_memory_stats()
            a = big(30); del a
            torch.accelerator.reset_peak_memory_stats() if hasattr(torch.accelerator, "reset_peak_memory_stats") else None
            a = big(25)
        def test_below_an_earlier_peak():
            a = big(800); del a
            b = torch.empty(11 * MIB + 300_000, dtype=torch.uint8, device="cuda")
        def test_smaller_than_before():
            a = [torch.empty(9 * MIB + 100_000 * n, dtype=torch.uint8, device="cuda") for n in range(9)]
            del a[::2]
            torch.cuda.synchronize()
            a.append(big(17))
        def test_nothing():
            pass
    """
    tests = {name: found["peaks"][0] for name, found in run(source, "--gpu-most-allocations=0").figures.items()}
    assert all(peak["is_exact"] for peak in tests.values()), tests
    assert tests["test_resets"]["allocated_bytes"] == 500 * MIB and tests["test_nothing"]["allocated_bytes"] == 0
    assert tests["test_resets_twice"]["allocated_bytes"] == 30 * MIB
    assert tests["test_below_an_earlier_peak"]["allocated_bytes"] == 800 * MIB
    # The counters' own word, where nobody was before: this time they are reset by us, between the sessions.
    torch.cuda.reset_peak_memory_stats()
    there = torch.cuda.memory_allocated()
    run(source.replace("def test_resets", "def hidden").replace("def test_below", "def hidden2"))
    assert torch.cuda.max_memory_allocated() - there == tests["test_smaller_than_before"]["allocated_bytes"], tests
    assert before is not None


def check_counters_are_left_alone():
    kept = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    high, stats = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
    ran = run(f"""
        @pytest.mark.limit_gpu("1 GiB")
        @pytest.mark.no_gpu_leak
        def test_sees_the_same():
            assert torch.cuda.max_memory_allocated() == {high}
            big(1)
            assert torch.cuda.max_memory_allocated() == {high}
    """, "--gpu-most-allocations=1")
    passes(ran, "test_sees_the_same")
    assert torch.cuda.max_memory_allocated() == high and not torch._C._cuda_isHistoryEnabled()
    assert torch.cuda.memory_stats()["num_ooms"] == stats["num_ooms"]
    assert torch._C._cuda_resetPeakMemoryStats.__name__ == "_cuda_resetPeakMemoryStats", "the original is back"


def check_reserved_memory_can_be_limited():
    torch.cuda.empty_cache()
    ran = run("""
        @pytest.mark.limit_gpu("100 MiB", kind="reserved")
        def test_fragments():
            a = big(70); del a
            b = big(80)
        @pytest.mark.limit_gpu("100 MiB", kind="rserved")
        def test_wrong():
            pass
        @pytest.mark.limit_gpu("many")
        def test_wrong_size():
            pass
    """)
    assert ran.outcomes["test_fragments", "call"] == "failed", ran.text
    assert "150.0 MiB of GPU memory reserved" in ran.words["test_fragments"], ran.text
    assert ran.outcomes["test_wrong", "setup"] == "failed" and "no such kind: `rserved`" in ran.words["test_wrong"]
    assert "not a size: `many`" in ran.words["test_wrong_size"], ran.text


def check_expected_failures_and_unittest():
    ran = run("""
        @pytest.mark.xfail(strict=True)
        @pytest.mark.limit_gpu("1 MiB")
        def test_known():
            big(2)
        @pytest.mark.limit_gpu("1 MiB")
        class TestCase(unittest.TestCase):
            def setUp(self):
                self.x = big(1)
            def test_fits(self):
                pass
            def test_does_not(self):
                y = big(1)
            def test_fails_itself(self):
                y = big(1)
                self.assertEqual(1, 2)
    """)
    assert ran.outcomes["test_known", "call"] == "skipped" and ran.outcomes["TestCase::test_fits", "call"] == "passed"
    assert "over its limit" in ran.words["TestCase::test_does_not"], ran.text
    words = ran.words["TestCase::test_fails_itself"]
    assert "1 != 2" in words and "over its limit" not in words, words


# Leaks


def check_what_stays_is_named():
    ran = run("""
        kept = []
        class Trainer:
            pass
        trainer = Trainer()
        @pytest.mark.no_gpu_leak
        @pytest.mark.parametrize("size", [0, 3])
        def test_list(size):
            if size:
                kept.append(big(size))
        @pytest.mark.no_gpu_leak
        def test_attribute():
            trainer.history = {"loss": big(2)}
        @pytest.mark.no_gpu_leak(allow="4 MiB")
        def test_allowed():
            kept.append(big(4))
        @pytest.mark.no_gpu_leak(allow="4 MiB")
        def test_more_than_allowed():
            kept.append(big(5))
        def test_nobody_asks():
            kept.append(big(6))
    """)
    passes(ran, "test_list[0]", "test_allowed", "test_nobody_asks")
    assert ran.outcomes["test_list[3]", "teardown"] == "failed" and ran.outcomes["test_list[3]", "call"] == "passed"
    words = ran.words["test_list[3]"]
    assert "test_list[3] left 3.0 MiB of GPU memory behind on cuda:0; held by" in words, words
    assert ".kept[0]  (1 block)" in words and "container" in words, words
    assert ".trainer.history['loss']" in ran.words["test_attribute"], ran.text
    assert "5.0 MiB" in ran.words["test_more_than_allowed"] and "4.0 MiB are allowed" in ran.words["test_more_than_allowed"]


def check_what_is_no_leak():
    torch._C._cuda_clearCublasWorkspaces()
    ran = run("""
        @pytest.fixture(scope="module")
        def model():
            return big(50)
        @pytest.fixture(scope="module", params=[1, 2])
        def whole(request, model):
            yield big(request.param)
        @pytest.fixture
        def batch():
            yield big(7)
        @pytest.fixture(scope="class")
        def lazily(request):
            return request.getfixturevalue("model")
        class TestOne:
            def test_fixtures(self, whole, batch, lazily):
                result = batch + 1
            def test_locals(self, batch):
                x = torch.ones(300, 300, device="cuda", requires_grad=True)
                (x @ x).sum().backward()
        def test_autocast():
            w = torch.ones(64, 64, device="cuda", requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                (w @ w).sum().backward()
        def test_own_error_is_handled():
            with pytest.raises(ValueError) as caught:
                x = big(9)
                raise ValueError
        class TestCase(unittest.TestCase):
            def test_self(self):
                self.x = big(3)
    """, "--gpu-no-leak")
    assert ran.code == 0, ran.text
    assert all(outcome == "passed" for outcome in ran.outcomes.values()) and len(ran.figures) == 6, ran.text
    assert all(found["is_checked_for_leaks"] for found in ran.figures.values())


def check_a_failure_s_own_traceback_is_no_leak_and_hides_none():
    ran = run("""
        kept = []
        def test_fails():
            x = big(40)
            assert x is None
        def test_leaks_after_it():
            kept.append(big(8))
        def test_fine():
            big(5)
        def test_skips():
            x = big(4)
            pytest.skip("no")
    """, "--gpu-no-leak")
    assert ran.outcomes["test_fails", "call"] == "failed" and ran.outcomes["test_fails", "teardown"] == "passed", ran.text
    assert ran.outcomes["test_leaks_after_it", "teardown"] == "failed", ran.text
    assert "8.0 MiB" in ran.words["test_leaks_after_it"], ran.text
    passes(ran, "test_fine")
    assert not ran.figures["test_fails"]["is_checked_for_leaks"] and ran.outcomes["test_skips", "teardown"] == "passed"


def check_a_fixture_that_ends_hides_no_leak_and_makes_none():
    ran = run("""
        kept = []
        @pytest.fixture(scope="class")
        def large():
            yield big(100)
        @pytest.fixture(scope="class")
        def stays():
            kept.append(big(3))
        class TestOne:
            def test_last_of_its_class(self, large):
                kept.append(big(2))
        class TestTwo:
            def test_fixture_keeps(self, stays):
                pass
        @pytest.fixture(scope="class")
        def box():
            box = [big(30)]
            yield box
        class TestThree:
            def test_empties_it(self, box):
                box.clear()
            def test_then_nothing_is_left(self, box):
                pass
        def test_after():
            pass
    """, "--gpu-no-leak")
    assert "left 2.0 MiB" in ran.words["TestOne::test_last_of_its_class"], ran.text
    assert "left 3.0 MiB" in ran.words["TestTwo::test_fixture_keeps"], ran.text
    passes(ran, "TestThree::test_empties_it", "TestThree::test_then_nothing_is_left", "test_after")


def check_dead_cycles_are_told_from_held_memory():
    source = """
        class Node:
            pass
        def cycle():
            node = Node()
            node.itself, node.data = node, big(4)
        {mark}
        def test_cycle():
            cycle()
        @pytest.mark.no_gpu_leak
        def test_plain():
            big(4)
    """
    gc.collect()
    gc.disable()
    try:
        ran = run(source.format(mark="@pytest.mark.no_gpu_leak"))
        passes(ran, "test_cycle", "test_plain")
        assert ran.figures["test_cycle"]["collected_bytes"] == 4 * MIB and ran.figures["test_plain"]["collected_bytes"] == 0
        assert "left to the garbage collector" in ran.section() and "4.0 MiB  test_session" in ran.section(), ran.text
        ran = run(source.format(mark="@pytest.mark.no_gpu_leak(collect=False)"))
        assert "a dead cycle" in ran.words["test_cycle"] and "4.0 MiB" in ran.words["test_cycle"], ran.text
    finally:
        gc.enable()


def check_no_pass_of_the_collector_where_nothing_grew():
    ran = run("""
        passes = []
        gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "stop" else None)
        def test_one():
            gc.disable()
            passes.clear()
            big(3)
        def test_two():
            assert 2 not in passes
            gc.enable()
            gc.callbacks.pop()
    """, "--gpu-no-leak")
    assert ran.code == 0, ran.text


def check_warmups_let_caches_fill():
    source = """
        import functools
        calls = []
        @functools.lru_cache
        def table():
            return big(2)
        @pytest.mark.no_gpu_leak(warmups={n})
        def test_cached():
            calls.append(None)
            table()
        @pytest.mark.no_gpu_leak(warmups=2)
        def test_still_leaks():
            calls.append(big(1))
        def test_count():
            assert sum(call is None for call in calls) == {n} + 1
    """
    ran = run(source.format(n=1))
    passes(ran, "test_cached", "test_count")
    assert "left 1.0 MiB" in ran.words["test_still_leaks"], ran.text
    ran = run(source.format(n=0))
    assert "cache" in ran.words["test_cached"] and "table" in ran.words["test_cached"], ran.text


def check_a_wider_fixture_that_grows_is_named_as_such():
    ran = run("""
        @pytest.fixture(scope="module")
        def registry():
            return {}
        def test_fills(registry):
            registry["model"] = big(6)
        def test_does_not(registry):
            pass
    """, "--gpu-no-leak")
    assert "fixture `registry`['model']  (1 block)" in ran.words["test_fills"], ran.text
    passes(ran, "test_does_not")


# What a session says


def check_the_section_at_the_end():
    ran = run("""
        def work(mib):
            return big(mib)
        def test_small():
            work(5)
        def test_large():
            x = work(90); y = big(10)
        def test_none():
            pass
    """, "--gpu-most-allocations=1", "--gpu-stacks=2")
    lines = ran.section().splitlines()
    assert len(lines) == 4 and lines[0].endswith("(1 of 3 tests)"), ran.text
    assert lines[1].split()[:2] == ["100.0", "MiB"] and lines[1].endswith("::test_large"), lines
    assert "90.0 MiB" in lines[2] and "big() <- test_session" in lines[2] and "work()" in lines[2], lines
    assert "10.0 MiB" in lines[3] and "test_large()" in lines[3], lines
    assert run("def test_none(): pass", "--gpu-most-allocations=3").section() == "no test allocated GPU memory"
    assert "GPU memory" not in run("def test_big(): big(5)").text


def check_json_and_recordings():
    report, folder = os.path.join(FOLDER.name, "out", "gpu.json"), os.path.join(FOLDER.name, "recordings")
    source = """
        @pytest.mark.parametrize("n", [1])
        def test_one(n):
            big(3)
        def test_two():
            x = big(2)
            assert 0
    """
    run(source, f"--gpu-report-json={report}", f"--gpu-recording={folder}")
    with open(report, encoding="utf-8") as file:
        written = json.load(file)
    peaks = [test["peaks"][0]["allocated_bytes"] for test in written["tests"]]
    assert written["schema_version"] == 1 and peaks == [3 * MIB, 2 * MIB], written
    assert written["tests"][0]["nodeid"].endswith("::test_one[1]") and written["tests"][0]["peaks"][0]["n_allocations"] == 1
    names = sorted(os.listdir(folder))
    assert len(names) == 2 and names[0].endswith("_test_one[1].pickle"), names
    words = [sys.executable, "-m", "unhand", "explain", os.path.join(folder, names[0])]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and "with stacks" in said.stdout and "(big)" in said.stdout, said.stdout + said.stderr


def check_the_fixture_gpu_memory():
    ran = run("""
        def test_figures(gpu_memory):
            a = big(30); del a
            b = big(4)
            assert gpu_memory.grown_bytes() == 4 * MIB and gpu_memory.peak_bytes() == 30 * MIB
            torch.cuda.reset_peak_memory_stats()
            assert gpu_memory.peak_bytes(0) == gpu_memory.peak_bytes("cuda:0") == 30 * MIB
            site, = gpu_memory.sites()
            assert site.requested_bytes == 30 * MIB and site.n_blocks == 1 and site.place.endswith("big()")
            assert gpu_memory.counters().allocated_bytes == torch.cuda.memory_allocated()
            del b
            assert gpu_memory.grown_bytes() == 0
    """)
    assert ran.code == 0, ran.text


def check_a_test_that_records_itself():
    """Its record is its own. What is not known then is said, and what the counters tell is enforced."""
    ran = run("""
        @pytest.mark.limit_gpu("1 MiB")
        def test_records():
            torch.cuda.memory._record_memory_history(max_entries=100)
            big(3)
            assert torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        @pytest.mark.limit_gpu("1 MiB")
        def test_known_from_counters():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=100)
            big(3)
            torch.cuda.memory._record_memory_history(enabled=None)
    """)
    assert ran.outcomes["test_records", "call"] == "passed", ran.text
    assert "test_records: its peak is not known" in ran.section(), ran.text
    assert "3.0 MiB of GPU memory" in ran.words["test_known_from_counters"], ran.text
    assert not torch._C._cuda_isHistoryEnabled()


def check_without_a_gpu_tests_run_and_nothing_is_checked():
    is_initialized, is_available = torch.cuda.is_initialized, torch.cuda.is_available
    torch.cuda.is_initialized = torch.cuda.is_available = lambda: False
    try:
        ran = run("""
            @pytest.mark.limit_gpu("1 MiB")
            @pytest.mark.no_gpu_leak
            def test_runs(gpu_memory):
                assert gpu_memory.peak_bytes() == gpu_memory.grown_bytes() == 0 and gpu_memory.counters() is None
            def test_is_not_asked_about():
                pass
        """)
    finally:
        torch.cuda.is_initialized, torch.cuda.is_available = is_initialized, is_available
    passes(ran, "test_runs", "test_is_not_asked_about")
    assert ran.section().startswith("not checked: test_session") and "test_runs: no GPU" in ran.section(), ran.text


def check_an_increase_since_the_last_successful_run():
    sizes = Path(FOLDER.name, "sizes.json")
    source = f"""
        import json
        SIZES = json.load(open({str(sizes)!r}))
        @pytest.mark.limit_gpu("100 MiB")
        @pytest.mark.parametrize("n", range(2))
        def test_one(n):
            big(SIZES[n])
    """
    hidden = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
    del hidden
    # Sizes, and how many tests fail. What fails is not remembered.
    for sizes_now, n_failed in (([10, 12], 0), ([10, 10], 0), ([12, 12], 2), ([12, 12], 2)):
        sizes.write_text(json.dumps(sizes_now), encoding="utf-8")
        ran = run(source, "--gpu-fail-on-increase", "-o", f"cache_dir={FOLDER.name}/cache", name="increase")
        outcomes = [outcome for (_, phase), outcome in ran.outcomes.items() if phase == "call"]
        assert outcomes.count("failed") == n_failed, (sizes_now, ran.text)
    assert "2.0 MiB more than in its last successful run" in ran.text and "big()  (1 block)" in ran.text, ran.text


if __name__ == "__main__":
    main(globals())
