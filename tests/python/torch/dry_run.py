"""`unhand dry-run` and `unhand stand-in` with the real PyTorch: figures, verdicts, exit codes, and nothing left behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import main

UNHAND = [sys.executable, "-m", "unhand"]
TRAIN = """
import argparse, sys, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
width = parser.parse_args().width
# Chosen by the program itself, before it imports anything that asks for a device.
total = torch.cuda.mem_get_info()[1]
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
try:
    for step in range(1000):
        optimizer.zero_grad()
        try:
            model(torch.randn(64, width, device="cuda")).sum().backward()
            optimizer.step()
        except Exception:
            sys.exit("an `except Exception` took what ends the run")
        print("step", step)
finally:
    stats = torch.cuda.memory_stats()
    names = ("requested", "allocated", "reserved")
    print("FIGURES", total, *(stats[f"{name}_bytes.all.peak"] for name in names))
"""
FAIL = """
import sys
import torch

def work():
    kept.append(torch.zeros(8 << 20, device="cuda"))
    raise ValueError(f"argument {sys.argv[1]} of {__name__} in {__file__}")

kept = []
work()
"""
DEVICE = """
import os, subprocess, torch
print(torch.cuda.get_device_name(1), torch.cuda.mem_get_info(1)[1], torch.cuda.device_count())
# On a GPU of compute capability 8.9 CUB sorts with the kernels for 8.6.
torch.nn.Embedding(64, 8).cuda()(torch.zeros(4096, dtype=torch.long, device="cuda")).sum().backward()
print(subprocess.run(["cat", "/dev/null"]).returncode, subprocess.run(["sh", "-c", "exit 3"]).returncode)
"""


def unhand(folder, *words, **options):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UNHAND_STANDIN_")}
    options = {"capture_output": True, "text": True, "timeout": 300, "stdin": subprocess.DEVNULL, "cwd": folder, **options}
    return subprocess.run([*UNHAND, *words], env={**environment, "TMPDIR": str(folder)}, **options)


def written(folder, name, text):
    (Path(folder) / name).write_text(text, encoding="utf-8")
    return name


def left_in(folder):
    """What is there, but for the cache that PyTorch itself makes where temporary files go."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("torchinductor_"))


def check_the_figures_are_what_pytorch_says_itself():
    with tempfile.TemporaryDirectory() as folder:
        script = written(folder, "train.py", TRAIN)
        outcome = unhand(folder, "dry-run", "--json", "--gpu", "t4", "--memory", "64MiB", "--max-steps", "2", "--record",
                         "run.pickle", script, "--width", "2048")
        # It does not fit what was asked about, and ran to its end all the same.
        assert outcome.returncode == 1, outcome
        answer = json.loads(outcome.stdout)
        assert (answer["exit_code"], answer["steps"], answer["stopped"]) == (0, 2, True), answer
        assert "step 0" in outcome.stderr and "step 1" not in outcome.stderr, outcome.stderr
        (device,) = answer["devices"]
        figures = next(line for line in outcome.stderr.splitlines() if line.startswith("FIGURES"))
        total, *peaks = map(int, figures.split()[1:])
        names = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        assert peaks == [device["peak"][name] for name in names], (peaks, device["peak"])
        # The script sees the memory that was asked about.
        assert total == 64 << 20, total
        assert device["name"] == "Tesla T4 (unhand stand-in)", device["name"]
        assert device["confidence"]["reserved"] == "exact" and device["confidence"]["context"] == "guess", device
        fits = {gpu["gpu"]: gpu["fits"] for gpu in device["gpus"]}
        assert all(fits.values()) and not device["fit"]["fits"], device["fit"]
        assert device["fit"]["lacking_bytes"] > 0, device["fit"]
        holders = {holder["site"]["name"].split(" ")[0] for holder in device["at_peak"]["holders"]}
        assert any(name.startswith("train.py:") for name in holders), holders
        # The history is a snapshot like any other.
        explained = json.loads(unhand(folder, "explain", "--json", "run.pickle").stdout)["explanations"][0]
        assert explained["peak"]["reserved"]["peak_bytes"] == device["peak"]["reserved_bytes"], explained["peak"]
        assert left_in(folder) == ["run.pickle", "train.py"], left_in(folder)


def check_a_script_that_fails_is_shown_as_it_is():
    with tempfile.TemporaryDirectory() as folder:
        script = written(folder, "fail.py", FAIL)
        outcome = unhand(folder, "dry-run", script, "7")
        assert outcome.returncode == 1, outcome
        assert f"ValueError: argument 7 of __main__ in {Path(folder).resolve() / script}" in outcome.stderr, outcome.stderr
        frames = [line.strip() for line in outcome.stderr.splitlines() if line.startswith("  File ")]
        assert len(frames) == 2 and all(script in frame for frame in frames), frames
        assert "cuda:0 at its peak" in outcome.stdout and "reserved     32.0 MiB" in outcome.stdout, outcome.stdout
        assert "failed with exit code 1" in " ".join(outcome.stdout.split()), outcome.stdout
        assert left_in(folder) == [script], left_in(folder)


def check_a_module_without_torch_is_run_and_nothing_is_said():
    with tempfile.TemporaryDirectory() as folder:
        written(folder, "plain.py", "import sys\nprint(__name__, sys.argv[1:])\nsys.exit(7)\n")
        outcome = unhand(folder, "dry-run", "-m", "plain", "--some", "words")
        assert outcome.returncode == 7, outcome
        assert outcome.stdout.startswith("__main__ ['--some', 'words']\n"), outcome.stdout
        assert "the program did not import torch" in outcome.stdout, outcome.stdout


def check_the_largest_value_that_fits_is_found():
    with tempfile.TemporaryDirectory() as folder:
        # A gigabyte a unit, on a GPU that has 11.8 GiB and loses some to the context.
        script = written(folder, "grow.py", "import sys, torch\nx = torch.empty(int(sys.argv[1]), 1 << 30, dtype=torch.uint8, "
                                            "device='cuda')\n")
        outcome = unhand(folder, "dry-run", "--json", "--gpu", "rtx3060-12", "--bisect", "n=6..12", script, "{n}")
        assert outcome.returncode == 0, outcome
        answer = json.loads(outcome.stdout)
        assert answer["largest"] == 11, answer
        assert all(run["fits"] == (run["value"] <= 11) for run in answer["runs"]) and len(answer["runs"]) <= 4, answer


def check_any_command_runs_on_the_machine_that_was_asked_for():
    with tempfile.TemporaryDirectory() as folder:
        words = ["stand-in", "--gpu", "l4", "--memory", "20GiB", "--devices", "2", "--", sys.executable, "-c", DEVICE]
        outcome = unhand(folder, *words)
        assert outcome.stdout == f"NVIDIA L4 (unhand stand-in) {20 << 30} 2\n0 3\n", outcome
        assert outcome.returncode == 0 and not outcome.stderr, outcome


if __name__ == "__main__":
    main(globals())
