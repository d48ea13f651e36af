"""`unhand doctor` about the stand-in and the real PyTorch: what it finds without importing is what PyTorch says."""

import json
import os
import subprocess
import sys

import torch
from bench import main


def doctor(*arguments, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-m", "unhand", "doctor", *arguments], env=environment, capture_output=True,
                          text=True, timeout=120)


def answer_of(**variables):
    outcome = doctor("--json", **variables)
    answer = json.loads(outcome.stdout)
    levels = [finding["level"] for finding in answer["findings"]]
    assert outcome.returncode == ("problem" in levels) and not outcome.stderr, outcome
    return answer


def sentences(answer, level):
    return [finding["sentence"] for finding in answer["findings"] if finding["level"] == level]


def check_nothing_is_wrong_here():
    answer = answer_of()
    assert sentences(answer, "problem") == [], answer["findings"]
    assert "No problem found." in doctor().stdout


def check_pytorch_is_found_by_its_files():
    found = answer_of()["python"]
    assert found["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda, "hip": None}, found


def check_devices_are_called_as_pytorch_calls_them():
    properties = torch.cuda.get_device_properties(0)
    device = answer_of()["devices"][0]
    assert (device["torch_index"], device["uuid"]) == (0, f"GPU-{properties.uuid}"), device
    assert device["total_bytes"] - device["reserved_bytes"] == torch.cuda.mem_get_info(0)[1]


def check_hidden_devices_are_named():
    for value in ("-1", "", "7", "GPU-0000", "nonsense"):
        answer = answer_of(CUDA_VISIBLE_DEVICES=value)
        assert answer["devices"][0]["torch_index"] is None, value
        said = sentences(answer, "problem") + sentences(answer, "warning")
        assert any("CUDA_VISIBLE_DEVICES" in sentence for sentence in said), answer["findings"]


def check_settings_are_judged_as_pytorch_judges_them():
    settings = "torch.cuda.memory._snapshot()['allocator_settings']['PYTORCH_CUDA_ALLOC_CONF']"
    program = f"import torch; torch.empty(1, device='cuda'); print({settings})"
    cases = [{"PYTORCH_CUDA_ALLOC_CONF": conf} for conf in ("expandable_segments:True", "max_split_size:64", "")]
    cases += [{"PYTORCH_ALLOC_CONF": conf} for conf in ("expandable_segments:True", "max_split_size:64")]
    cases += [{"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size:1"}]
    for variables in cases:
        outcome = subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True,
                                 text=True, timeout=120)
        refusals = [sentence for sentence in sentences(answer_of(**variables), "problem") if "refused" in sentence]
        assert bool(refusals) == (outcome.returncode != 0), (variables, refusals, outcome.stderr)
    # The last case is the one where both are set: the older name is what counts.
    assert outcome.stdout == "max_split_size_mb:64\n", outcome.stdout


if __name__ == "__main__":
    main(globals())
