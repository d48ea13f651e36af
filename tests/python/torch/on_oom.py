"""The flight recorder: what it writes, wherever memory runs out, and that the program's own error stays as it is."""

# stand-in: UNHAND_STANDIN_MEMORY=12GiB

import contextlib
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref

import torch
from bench import main, raises
from torch import nn

import unhand
from unhand import _batch_size, _on_oom

GIB = 1 << 30
FILES = ["report.json", "report.txt", "snapshot.pickle"]
PYTHON = [sys.executable]


@contextlib.contextmanager
def recorder(**options):
    """A recorder in a folder of its own, and what it said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), unhand.on_oom(folder, **options) as made:
            made.said = said
            yield made
        clear()


def clear():
    gc.collect()
    torch.cuda.empty_cache()


def run_out(n_bytes=100 * GIB):
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


def report(made, index=0):
    assert len(made.recordings) > index, made.said.getvalue()
    with open(os.path.join(made.recordings[index], "report.json"), encoding="utf-8") as file:
        return json.load(file)


def page(made):
    with open(os.path.join(made.recordings[0], "report.txt"), encoding="utf-8") as file:
        return file.read()


def check_nothing_starts_before_cuda():
    """First of all: it needs a process in which CUDA is not started."""
    assert not torch.cuda.is_initialized()
    with recorder(history="events") as made:
        assert not torch.cuda.is_initialized()
        raises(torch.OutOfMemoryError, run_out, "Tried to allocate")
        assert torch._C._cuda_isHistoryEnabled()
        assert report(made)["failure"]["segment_bytes"] == 100 * GIB
    assert not torch._C._cuda_isHistoryEnabled()


def forward(model, batch):
    hidden = batch
    for layer in model:
        hidden = layer(hidden)
    return hidden


def check_a_forward_pass():
    clear()
    with recorder(history="stacks") as made:
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
        data = batch = torch.zeros(65536, 4096, device="cuda")
        counters = torch.cuda.memory_stats()["allocation.all.allocated"]
        with contextlib.suppress(torch.OutOfMemoryError):
            for _ in range(2):
                batch = forward(model, batch)
        found = report(made)
        assert sorted(os.listdir(made.recordings[0])) == FILES and os.listdir(made.path) == [os.path.basename(made.recordings[0])]
        assert found["schema_version"] == 1 and found["requested_bytes"] == found["failure"]["segment_bytes"] == GIB
        assert found["stack"][0]["function"].endswith("forward") and found["thread"] == "MainThread", found["stack"]
        assert any(line["function"] == "forward" and line["file"] == __file__ for line in found["stack"])
        assert found["ladder"]["reserved_bytes"] >= 10 * GIB and found["ladder"]["allocated_bytes"] > 10 * GIB
        held = sum(holder["bytes"] for holder in found["holders"]) + found["more_holders_bytes"] + found["unattributed_bytes"]
        assert held == found["ladder"]["allocated_bytes"] and found["holders"][0]["kind"] == "autograd graph", found["holders"]
        assert "from the first allocation on" in found["history"] or "older than it" in found["history"], found["history"]
        # Where the device is larger than the test asks for, a limit stands for its end.
        assert "real shortage" in found["verdict"] or "A limit of this process" in found["verdict"], found["verdict"]
        assert "No allocator setting" in found["settings"]["sentence"], found
        batch_size = found["batch"]
        assert batch_size["size"] == 65536 and 1 < batch_size["fits"] < 65536 and batch_size["confidence"] == "low", batch_size
        assert {"name": "data", "shape": [65536, 4096]} in found["inputs"], found["inputs"]
        text = page(made)
        for words in ("A request of 1.0 GiB failed", "Where\n", "forward()", "Held by", "A batch of about"):
            assert words in text, text
        with open(os.path.join(made.recordings[0], "snapshot.pickle"), "rb") as file:
            content = file.read()
        assert content[:2] == b"\x80\x04"
        snapshot = pickle.loads(content)
        assert [entry["action"] for entry in snapshot["device_traces"][0] if entry["action"] != "snapshot"][-1] == "oom"
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - counters <= 24, "the recorder allocated on the GPU"
        del model, batch, data


def check_unhand_explain_and_pytorch_s_viewer_read_it():
    with recorder(history="stacks") as made:
        keep = run_out(GIB)
        raises(torch.OutOfMemoryError, run_out)
        folder = made.recordings[0]
        answer = outcome_of([*PYTHON, "-m", "unhand", "explain", "--json", made.path])
        explained = json.loads(answer.stdout)["explanations"][0]
        assert explained["ooms"][0]["wanted_bytes"] == 100 * GIB, explained["ooms"]
        from torch.cuda import _memory_viz

        with open(os.path.join(folder, "snapshot.pickle"), "rb") as file:
            snapshot = pickle.load(file)
        assert "OutOfMemoryError" in _memory_viz.trace(snapshot) and _memory_viz.trace_plot(snapshot)
        del keep


FRAGMENTED = """
import sys, torch, unhand
made = unhand.on_oom(sys.argv[1], history="stacks")

def block(n_mib):
    return torch.empty(n_mib << 20, dtype=torch.uint8, device="cuda")

def fragmented():
    pairs = []
    for _ in range(5):
        whole = block(2048)
        del whole
        pairs.append((block(1984), block(64)))
    return [pin for _, pin in pairs]

pins = fragmented()
try:
    block(3072)
except torch.OutOfMemoryError:
    pass
print(made.recordings[0])
print("torch._inductor" in sys.modules, "_inductor" in torch.__dict__)
"""


def check_fragmentation_names_the_setting_and_the_pins():
    """Five holes of almost 2 GiB, none of which takes 3 GiB: expandable segments would have."""
    with tempfile.TemporaryDirectory() as folder:
        lines = outcome_of([*PYTHON, "-c", FRAGMENTED, folder]).stdout.splitlines()
        found = json.loads(read(lines[0], "report.json"))
        assert found["settings"]["is_exact"] and found["settings"]["fits"], found["settings"]
        sentence = found["settings"]["sentence"]
        assert sentence.startswith("PYTORCH_CUDA_ALLOC_CONF="), sentence
        assert "expandable_segments:True would have served" in sentence, sentence
        stuck, = found["stuck"]
        assert stuck["pinned_by"] == "__main__.pins[…]" and (stuck["n_segments"], stuck["bytes"]) == (5, 5 * 1984 << 20), stuck
        text = read(lines[0], "report.txt")
        assert "What pins the stuck memory" in text and "in 5 segments, beside 320.0 MiB of __main__.pins[…]" in text, text
        # PyTorch imports its compiler to name the lines of a stack, in the middle of it all: seconds.
        assert lines[1] == "False False"


def check_a_thread_of_autograd():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            run_out()

    with recorder() as made:
        weight = torch.ones(4, device="cuda", requires_grad=True)
        raises(torch.OutOfMemoryError, lambda: Failing.apply(weight).sum().backward())
        found = report(made)
        assert not found["stack_is_main"] and found["stack"][1]["function"].endswith("backward"), found["stack"][:3]
        assert "Failing" in found["node"], found["node"]
        assert found["requested_bytes"] is None and "history" in found["history"]


def check_a_backward_without_python_frames():
    """A node of C++ is running, with its lock, and the heap has that node's saved tensors."""
    with recorder(history="stacks") as made:
        weight = torch.ones(1, 1, device="cuda", requires_grad=True)
        other = torch.ones(1 << 30, 1, device="cuda")
        keep = [run_out(GIB) for _ in range(3)]
        wide = weight * other
        raises(torch.OutOfMemoryError, lambda: wide.backward(other.expand(1 << 30, 1)))
        found = report(made)
        assert found["stack_is_main"] and found["node"] == "MulBackward0", (found["node"], found["stack"][:2])
        assert any(line["function"].endswith("backward") for line in found["stack"])
        assert "what waits for it in the main thread" in page(made)
        del keep, wide, other


def check_the_thread_of_a_data_loader():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(4)

    def place(samples):
        run_out()

    with recorder() as made:
        errors = []

        def load():
            try:
                list(torch.utils.data.DataLoader(Data(), collate_fn=place))
            except torch.OutOfMemoryError as error:
                errors.append(str(error))

        thread = threading.Thread(target=load, name="loader")
        thread.start()
        thread.join()
        assert len(errors) == 1 and "Tried to allocate" in errors[0]
        found = report(made)
        assert found["thread"] == "loader" and any(line["function"].endswith("place") for line in found["stack"])
        assert "on the thread loader" in page(made)


def check_caught_and_retried():
    """Once for the first, nothing for those after it, and the program goes on."""
    with recorder() as made:
        for attempt in range(5):
            try:
                kept = run_out(100 * GIB if attempt < 4 else GIB)
            except torch.OutOfMemoryError:
                continue
        assert kept.numel() == GIB and made.n_seen == 4 and len(made.recordings) == 1
        assert made.said.getvalue().count("\n") == 1, made.said.getvalue()


def check_a_second_one_where_two_are_wanted():
    with recorder(limit=2) as made:
        for n_gib in (100, 200, 300):
            raises(torch.OutOfMemoryError, lambda: run_out(n_gib * GIB))
        assert [report(made, index)["failure"]["segment_bytes"] for index in (0, 1)] == [100 * GIB, 200 * GIB]
        assert len(made.recordings) == len(set(made.recordings)) == len(os.listdir(made.path)) == 2


def check_another_device_is_not_recorded():
    with recorder(device="cuda:1") as made:
        raises(torch.OutOfMemoryError, run_out)
        assert not made.recordings and made.n_seen == 1
    raises(ValueError, lambda: unhand.on_oom(device="cpu"), "not a CUDA device")
    raises(ValueError, lambda: unhand.on_oom(history="all"), "not a kind of history")
    raises(ValueError, lambda: unhand.on_oom(limit=0), "1 or more")


def check_nothing_is_kept():
    """Neither the failed frames nor what they had, and no recorder that was closed."""
    with recorder(history="stacks") as made:

        def fail():
            kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
            gone.append(weakref.ref(kept))
            run_out()

        gone = []
        raises(torch.OutOfMemoryError, fail)
        assert report(made)["holders"][0]["path"].endswith("local `kept`"), report(made)["holders"]
        assert gone[0]() is None, gc.get_referrers(gone[0]())
        assert made in _on_oom._recorders
    assert made not in _on_oom._recorders and sys.excepthook is sys.__excepthook__
    raises(torch.OutOfMemoryError, run_out)
    assert len(made.recordings) == 1


def check_an_unwritable_folder_leaves_the_error_alone():
    with tempfile.NamedTemporaryFile() as file, contextlib.redirect_stderr(io.StringIO()) as said:
        with unhand.on_oom(os.path.join(file.name, "below")) as made:
            raises(torch.OutOfMemoryError, run_out, "Tried to allocate")
        assert said.getvalue().startswith("unhand: cannot record the out-of-memory error: [Errno"), said.getvalue()
        assert said.getvalue().count("\n") == 1 and not made.recordings


def check_a_full_disk_leaves_nothing():
    from unhand import _recording

    def full(path, content):
        raise OSError(28, "No space left on device", path)

    original, _recording._write_file = _recording._write_file, full
    try:
        with recorder() as made:
            raises(torch.OutOfMemoryError, run_out, "Tried to allocate")
            assert "No space left on device" in made.said.getvalue() and os.listdir(made.path) == []
    finally:
        _recording._write_file = original


def check_a_history_of_the_user_s_is_left_alone():
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1234)
    try:
        with recorder(history="stacks") as made:
            raises(torch.OutOfMemoryError, run_out)
            with open(os.path.join(made.recordings[0], "snapshot.pickle"), "rb") as file:
                events = pickle.load(file)["device_traces"][0]
            assert events and not any(event.get("frames") for event in events)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def check_torch_compile_is_not_asked_to_compile_the_recorder():
    with recorder() as made:

        @torch.compile(backend="eager")
        def step(value):
            print(end="")  # Breaks the graph: what follows runs with the compiler watching every frame.
            return value + torch.empty(100 * GIB // 4, device="cuda")[:4]

        raises(Exception, lambda: step(torch.ones(4, device="cuda")))
        compiled = getattr(torch._dynamo.utils, "compilation_time_metrics", {})
        assert report(made) and "_on_oom" not in str(compiled) and "_recording" not in str(compiled)


def outcome_of(command, code=0, **options):
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)
    assert outcome.returncode == code, f"{outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome


SCRIPT = """
import os, sys

def work(rank):
    import torch

    n_gib = 2 if rank == 1 else 1
    held = [torch.empty(n_gib << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
    batch = torch.zeros(16 * n_gib, 128, device="cuda")
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        import multiprocessing

        child = multiprocessing.get_context("spawn").Process(target=work, args=(0,))
        child.start()
        child.join()
        sys.exit(40 + child.exitcode)
    elif sys.argv[1] == "cublas":
        import torch

        torch.ones(1, device="cuda")
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    else:
        work(int(os.environ.get("RANK", 0)))
"""


@contextlib.contextmanager
def script():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "job.py"), "w", encoding="utf-8") as file:
            file.write(SCRIPT)
        yield folder


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def check_unhand_run_in_spawned_children():
    with script() as folder:
        command = [*PYTHON, "-m", "unhand", "run", "--recordings", "here", "job.py", "spawn"]
        outcome = outcome_of(command, code=41, cwd=folder)
        assert "unhand: out of GPU memory" in outcome.stderr, outcome.stderr
        made, = os.listdir(os.path.join(folder, "here"))
        assert json.loads(read(folder, "here", made, "report.json"))["stack"][0]["function"] == "work"


def check_unhand_run_and_an_error_of_a_library():
    with script() as folder:
        outcome = outcome_of([*PYTHON, "-m", "unhand", "run", "job.py", "cublas"], code=1, cwd=folder)
        assert outcome.stderr.count("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED") == 1, outcome.stderr
        made, = os.listdir(os.path.join(folder, "unhand-oom"))
        found = json.loads(read(folder, "unhand-oom", made, "report.json"))
        assert "CUBLAS_STATUS_ALLOC_FAILED" in found["failure"]["error"] and found["failure"]["segment_bytes"] is None
        assert found["stack"][0]["function"] == "<module>" and len(found["stack"]) == 1, found["stack"]
        assert "not of PyTorch's allocator" in read(folder, "unhand-oom", made, "report.txt")


def check_an_error_of_a_library_at_the_end_of_a_program():
    def failed():
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    told = []
    original, sys.excepthook = sys.excepthook, lambda *error: told.append(error[1])
    try:
        with recorder() as made:
            for error in (ValueError("x"), None):
                try:
                    if error is not None:
                        raise error
                    failed()
                except Exception as caught:
                    sys.excepthook(type(caught), caught, caught.__traceback__)
                assert len(made.recordings) == (error is None)
            found = report(made)
            assert found["stack"][0]["function"].endswith("failed") and found["holders"][0]["bytes"] == GIB, found
            assert [type(error) for error in told] == [ValueError, RuntimeError]
            told.clear()
    finally:
        sys.excepthook = original


def check_ranks_share_a_folder_and_the_different_one_is_named():
    with script() as folder:
        command = [*PYTHON, "-m", "unhand", "run", "job.py", "plain"]
        # One of them through a program between it and the launcher.
        between = ["sh", "-c", '"$@"; exit $?', "sh"]
        ranks = [
            subprocess.Popen(
                [*(between if rank == 2 else []), *command], cwd=folder, env=dict(os.environ, RANK=str(rank), WORLD_SIZE="3"), stderr=subprocess.PIPE, text=True
            )
            for rank in range(3)
        ]
        lines = [rank.communicate(timeout=200)[1].splitlines() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1, 1], lines
        for said in lines:
            assert said[0].startswith("unhand: out of GPU memory: recorded in "), said
            # The traceback is that of `python job.py`: it begins with the script.
            assert said[1] == "Traceback (most recent call last):" and "job.py" in said[2], said
            assert "unhand" not in "".join(said[2:]), said
        run, = os.listdir(os.path.join(folder, "unhand-oom"))
        assert sorted(os.listdir(os.path.join(folder, "unhand-oom", run))) == ["rank0", "rank1", "rank2"]
        found = json.loads(read(folder, "unhand-oom", run, "rank0", "report.json"))
        assert "with stacks, from the first allocation on" in found["history"], found["history"]
        assert found["holders"][0]["path"].endswith("local `held`") and found["holders"][0]["bytes"] == 3 * GIB
        assert [line["function"] for line in found["stack"]] == ["work", "<module>"], found["stack"]
        assert "rank 1 of 3" in read(folder, "unhand-oom", run, "rank1", "report.txt")
        answer = json.loads(outcome_of([*PYTHON, "-m", "unhand", "explain", "--json", "unhand-oom"], cwd=folder).stdout)
        different = answer["comparison"]["different"]
        assert different["row"] == 1 and different["sentence"].startswith("Rank 1 is different: it has 6.0 GiB allocated"), different
        assert different["inputs"][0] == {"name": "batch", "shape": [32, 128], "others": [16, 128]}, different
        assert "job.py:8" in different["holders"][0]["place"], different


def check_a_batch_size_from_shapes():
    """Without PyTorch: what grows, what does not, what cannot be told."""
    shaped, data = _batch_size.Shaped, _batch_size.Input
    fixed = [shaped(10 * GIB, (4096, 4096))]
    room = {"allocated_bytes": 30 * GIB, "failed_bytes": 2 * GIB, "room_bytes": 31 * GIB}
    activations = [shaped(15 * GIB, (32, 512, 4096)), shaped(5 * GIB, (32 * 512, 4096))]
    known = {(4096, 4096)}
    found = _batch_size.estimate(fixed + activations, known, [data("x", (32, 512))], in_backward=True, **room)
    assert (found.size, found.fits, found.confidence) == (32, 30, "medium"), found
    assert (found.scaling_bytes, found.fixed_bytes) == (20 * GIB, 10 * GIB)
    found = _batch_size.estimate(fixed + activations, known, [], **room)
    assert (found.size, found.fits, found.confidence) == (32, 30, "low") and "bound" in found.reason
    found = _batch_size.estimate(fixed + activations, known, [], missing_bytes=10 * GIB, **room)
    assert found.fits == 16 and "still to come" in found.reason, found
    found = _batch_size.estimate(fixed, known, [], **room)
    assert found.fits is None and "no tensor is alive" in found.reason
    found = _batch_size.estimate([shaped(GIB, (size, 3)) for size in (7, 11, 13, 17)], known, [], **room)
    assert found.fits is None and found.size is None and "in common" in found.reason, found
    found = _batch_size.estimate([shaped(GIB, (1, 512, 4096))], known, [data("x", (1, 512))], **room)
    assert found.fits is None and found.size == 1
    found = _batch_size.estimate(fixed + activations, known, [], allocated_bytes=30 * GIB, failed_bytes=GIB, room_bytes=64 * GIB)
    assert found.fits is None and "layout" in found.reason
    found = _batch_size.estimate(fixed + activations, known, [], allocated_bytes=30 * GIB, failed_bytes=GIB, room_bytes=10 * GIB)
    assert found.fits is None and "not even" in found.reason


def check_places_of_recordings():
    place = _on_oom._place
    parent, name = place("/r", {})
    assert parent == "/r" and name.endswith(f"-{os.getpid()}")
    parent, name = place("/r", {"RANK": "3", "TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert name == "rank3" and parent.endswith("-a_b-restart2"), parent
    assert place("/r", {"RANK": "0"}) == (place("/r", {"RANK": "1"})[0], "rank0")


if __name__ == "__main__":
    main(globals())
