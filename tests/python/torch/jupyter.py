"""One notebook in a real Jupyter kernel: what each cell shows as text and as HTML, and that memory goes where it is said.

With UNHAND_NOTEBOOK the executed notebook is written there: tests/browser/screenshots.py makes pictures of its outputs.
"""

# packages: jupyter

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import nbclient
import nbformat
from bench import main

MIB = 1 << 20

CELLS = {
    "load": "%load_ext unhand",
    "before": "%%unhand before CUDA\nimport gc, time, torch\nfrom torch import nn",
    "no gpu": "%unhand report",
    "model": (
        "%%unhand model\n"
        "model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "losses = []"
    ),
    "step": (
        "%%unhand step\n"
        "losses.append(model(torch.zeros(64, 1024, device='cuda')).square().mean())\n"
        "losses[-1].backward(retain_graph=True)\n"
        "optimizer.step()"
    ),
    "shown": "%%unhand\ntorch.ones(1 << 20, device='cuda')",
    "nothing": "%%unhand nothing\nsum(range(10))",
    "await": "%%unhand async\nimport asyncio\nawait asyncio.sleep(0.01)\nlater = torch.ones(1 << 20, device='cuda')\n'done'",
    "del": "held = torch.cuda.memory_allocated()\ndel later\nheld - torch.cuda.memory_allocated()",
    "timed": "%%unhand\n%%time\ninner = torch.ones(1 << 20, device='cuda')",
    "untimed": "%%time\n%%unhand nested\ninner = torch.ones(1 << 20, device='cuda')\ninner.shape",
    "hostile": "%%unhand <script>alert(1)</script>\nhostile = {'<img src=x onerror=alert(1)>\\u202e': torch.ones(1 << 20, device='cuda')}",
    "report": "%unhand report",
    "holders": "%unhand holders losses[0]",
    "ladder": "%unhand ladder cuda:0",
    "live": "%unhand live on",
    "failing": (
        "%%unhand failing\n"
        "def attempt():\n"
        "    activations = torch.ones(8 << 20, device='cuda')\n"
        "    raise RuntimeError('on purpose')\n"
        "\n"
        "attempt()"
    ),
    "free": "before = torch.cuda.memory_allocated()\nfreed = %unhand free\nfreed",
    "proof": "before - torch.cuda.memory_allocated(), freed.freed_bytes, sorted({holder.kind for holder in freed.kept})",
    "interrupt": (
        "%%unhand stopped\n"
        "import _thread, threading\n"
        "kept = torch.ones(1 << 20, device='cuda')\n"
        "threading.Timer(0.3, _thread.interrupt_main).start()\n"
        "for _ in range(200):\n"
        "    time.sleep(0.05)"
    ),
    "automatic": "%unhand footer on",
    "grown": "grown = torch.ones(1 << 20, device='cuda')",
    "small": "small = torch.ones(10, device='cuda')",
    "quiet": "1 + 1",
    "both": "%%time\n%%unhand only\ngrown = torch.ones(1 << 20, device='cuda')",
    "off": "figure = torch.cuda.memory_allocated()\n%unhand footer off\n%unhand live off",
    "silent": "grown = torch.ones(2 << 20, device='cuda')",
    "figure": "import unhand._native\nunhand._native.format_bytes(figure)",
    "recording": "torch._C._cuda_isHistoryEnabled(), torch.cuda.max_memory_allocated() > torch.cuda.memory_allocated()",
    "wrong name": "%unhand free modle",
    "shown and freed": "inner",
    "only shown": "grown",
    "free model": "answer = %unhand free model optimizer losses inner\nanswer",
    "forgotten": "[value is grown for value in Out.values() if isinstance(value, torch.Tensor)]",
    "freed": "repr(model[0].weight), torch.ones(3, device='cuda').sum().item()",
    "compact": "%unhand compact --dry-run",
    "complete": "get_ipython().complete('mod', '%unhand free mod', 16)[1]",
    "gone": "%unload_ext unhand\n%unhand report",
}

ran = {}


def outputs(name):
    """What a cell showed; the notebook runs once."""
    if not ran:
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
        nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", allow_errors=True).execute()
        if path := os.environ.get("UNHAND_NOTEBOOK"):
            nbformat.write(notebook, path)
        ran.update(zip(CELLS, notebook.cells))
    return ran[name].outputs


def text(name):
    """All plain text of a cell."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", []))
        for output in outputs(name)
    )


def html(name):
    """All HTML of a cell."""
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs(name))


def groups(name):
    """The lines of a cell's footer, by group."""
    found, group = {}, None
    for line in text(name).splitlines():
        if line.strip() in ("defined by the cell", "added to what was there", "left behind"):
            group = found.setdefault(line.split()[0], [])
        elif group is not None and line.startswith("  "):
            group.append(" ".join(line.split()))
    return found


def check_before_cuda_is_started():
    assert text("load").strip() == ""
    assert "unhand: before CUDA, " in text("before") and "no GPU memory" in text("before")
    assert "no GPU memory" in text("no gpu") and "no GPU memory" in html("no gpu")


def check_results_are_told_from_what_is_left_behind():
    found = groups("model")
    assert set(found) == {"defined"} and found["defined"][0] == "16.0 MiB parameters model (Sequential, 4 storages)"
    assert "(+16.0 MiB)" in text("model") and "peak 16.0 MiB" in text("model")
    found = groups("step")
    assert set(found) in ({"added", "left"}, {"added"}), "which workspaces a product needs differs by release"
    assert found["added"][0] == "32.0 MiB optimizer state optimizer.state (defaultdict, 8 storages)"
    assert any(line.startswith("16.0 MiB gradients model") for line in found["added"])
    assert any("autograd graph losses[0]" in line for line in found["added"])
    assert any("A graph hangs on it" in line for line in found["added"])
    assert all("workspace" in line or "Libraries" in line for line in found.get("left", []))
    found = groups("shown")
    assert set(found) == {"left"} and found["left"][0] == "4.0 MiB notebook history Out[6] (Tensor)"
    assert "%unhand free" in text("shown") and "tensor(" in text("shown")
    assert "(+0 B)" in text("nothing") and not groups("nothing") and "45" in text("nothing")
    for part in ("optimizer.state", "Out[6]", "left behind"):
        assert part in (html("step") + html("shown")).replace("<wbr/>", ""), part


def check_the_footer_keeps_nothing():
    assert "'done'" in text("await") and groups("await")["defined"] == ["4.0 MiB global later (Tensor)"]
    assert text("del") == str(4 * MIB)
    assert text("recording") == "(False, True)", "no record stays on, and no peak is reset"


def check_with_time():
    assert "Wall time" in text("timed") and groups("timed")["defined"][0] == "4.0 MiB global inner (Tensor)"
    assert "Wall time" in text("untimed") and groups("untimed")["defined"][0].startswith("4.0 MiB global inner (Tensor)")
    assert "torch.Size([1048576])" in text("untimed")


def check_hostile_names():
    assert "<script" not in html("hostile") and "&lt;script&gt;" in html("hostile")
    for name in ("hostile", "report"):
        assert "<img" not in html(name) and "&lt;img" in html(name) and "\u202e" not in html(name)


def check_answers_are_text_and_html():
    for name, words in {"report": "held by", "holders": "losses[0]", "ladder": "reserved by PyTorch", "compact": "reserved"}.items():
        assert words in text(name) and words in html(name).replace("<wbr/>", ""), name
        assert "<table" in html(name) and not text(name).startswith("<"), name
    assert "Report(" not in text("report"), "the text and not the fields"


def check_a_failing_cell():
    assert "on purpose" in text("failing") and "failed with RuntimeError" in text("failing")
    found = groups("failing")
    assert set(found) == {"left"}
    assert found["left"][0].startswith("32.0 MiB traceback sys.last_")
    assert "In[17]:4 attempt() local `activations`" in found["left"][0]
    assert "`%unhand free` lets go of it" in text("failing")
    freed, told, kinds = eval(text("proof"))
    assert freed == told >= 36 * MIB, "the traceback and the shown value are gone"
    assert not {"traceback", "notebook history"} & set(kinds)
    assert "returned " in text("free") and "notebook history" in html("free")


def check_an_interrupted_cell():
    assert "KeyboardInterrupt" in text("interrupt") and ", interrupted" in text("interrupt")
    assert groups("interrupt")["defined"] == ["4.0 MiB global kept (Tensor)"]


def check_automatic_footers():
    assert groups("grown")["defined"] == ["4.0 MiB global grown (Tensor)"]
    assert "(+512 B)" in text("small") and not groups("small"), "a look at the heap is not worth it"
    assert "unhand:" not in text("quiet") and "unhand:" not in text("silent")
    assert text("both").count("unhand:") == 1 and "unhand: only" in text("both")


def check_the_live_ladder_is_that_of_the_last_cell():
    figure = text("figure").strip("'")
    assert f"allocated {figure}" in text("live") and f"allocated {figure}" in html("live")
    assert 'role="img"' in html("live") and len(outputs("live")) == 1


def check_freed_values_are_forgotten():
    assert "did you mean `model`?" in text("wrong name") and not html("wrong name")
    assert "storages of the targets" in text("free model")
    assert text("forgotten") == "[True]", "`inner` was shown and freed, `grown` only shown"
    assert "<freed Parameter" in text("freed") and "3.0" in text("freed")


def check_completion_and_the_end():
    assert "'model'" in text("complete")
    assert "not found" in text("gone")


if __name__ == "__main__" and len(sys.argv) > 1 and sys.argv[1] == "show":
    for name in CELLS:
        print("=====", name)
        print(CELLS[name])
        print("-----")
        print(text(name))
    sys.exit()


if __name__ == "__main__":
    main(globals())
