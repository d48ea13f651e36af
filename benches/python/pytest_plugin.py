"""What leak checks cost a suite of GPU tests: without, with unhand's plugin, and with PyTorch's own `CudaMemoryLeakCheck`.

`python3 pytest_plugin.py [TESTS] [ROUNDS]`: each way in a process of its own, by turns, the best of the rounds. The tests
allocate, multiply, go backward and leave nothing; PyTorch and a model in a module fixture are there in all of them. What
is timed is the session after its first test, without imports.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

WAYS = {
    "no plugin": [],
    "plugin loaded, nothing asked": ["-p", "unhand.pytest_plugin"],
    "no_gpu_leak on all tests": ["-p", "unhand.pytest_plugin", "--gpu-no-leak"],
    "no_gpu_leak and peaks of all tests": [
        "-p", "unhand.pytest_plugin", "--gpu-no-leak", "--gpu-report-json=FOLDER/out.json"
    ],
    "CudaMemoryLeakCheck on all tests": ["-p", "torch_s_own"],
}

SLOW = ("CudaMemoryLeakCheck on all tests",)

TESTS = '''
import pytest, torch
from torch import nn

@pytest.fixture(scope="module")
def model():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()

@pytest.fixture
def batch():
    return torch.ones(64, 512, device="cuda")

@pytest.mark.parametrize("n", range({n}))
def test_step(model, batch, n):
    x = torch.empty(1 + n, 1024, device="cuda")
    loss = model(batch).square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)
    assert x.shape[0] == 1 + n
'''

# As `torch.testing._internal.common_utils.TestCase` wraps its tests.
TORCH_S_OWN = '''
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    from torch.testing._internal.common_utils import CudaMemoryLeakCheck
    import unittest
    with CudaMemoryLeakCheck(unittest.TestCase(), item.nodeid):
        yield
'''

CLOCK = '''
import json, time
import pytest

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    yield
    clock["end"] = time.perf_counter(), time.process_time()

def pytest_runtest_logfinish(nodeid):
    # The first test makes the context, the model and the workspaces.
    clock.setdefault("start", (time.perf_counter(), time.process_time()))

def pytest_unconfigure(config):
    (wall, cpu), (wall_end, cpu_end) = clock["start"], clock["end"]
    print("\\nclock", json.dumps([wall_end - wall, cpu_end - cpu]))

clock = {}
'''


def session(folder, way):
    """Wall and CPU seconds of a session."""
    options = [option.replace("FOLDER", folder) for option in WAYS[way]]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "clock", "-p", "no:cacheprovider", "-p", "no:anyio", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ["PYTHONPATH"]])}
    done = subprocess.run([*words, f"{folder}/test_suite.py"], env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(f"{way}:\n{done.stdout}{done.stderr}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("clock ")).partition(" ")[2])


def main(n_tests, n_rounds):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {
            "test_suite.py": TESTS.format(n=n_tests + 1), "torch_s_own.py": TORCH_S_OWN, "clock.py": CLOCK
        }.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        found = {way: [] for way in WAYS}
        began = time.time()
        for turn in range(n_rounds):
            # PyTorch's own takes a minute and more, and is not close: once is enough.
            for way in WAYS if turn == 0 else [way for way in WAYS if way not in SLOW]:
                found[way].append(session(folder, way))
    best = {way: [min(column) for column in zip(*times)] for way, times in found.items()}
    plain = best["no plugin"]
    print(f"{n_tests} tests, best of {n_rounds}, {time.time() - began:.0f} s")
    for way, (wall, cpu) in best.items():
        row = {"way": way, "wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "wall_ratio": round(wall / plain[0], 2),
               "cpu_ratio": round(cpu / plain[1], 2), "cpu_ms_per_test_more": round((cpu - plain[1]) / n_tests * 1e3, 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 200, int(sys.argv[2]) if sys.argv[2:] else 3)
