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

CELLS = {
    "load": "%load_ext unhand",
    "before": "%%unhand before CUDA\nimport gc, time, torch\nfrom torch import nn",
    "imports": "%unhand report",
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
    "proof": "before - torch.cuda.memory_allocated(), freed.freed_bytes",
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
    "off": "%unhand footer off\n%unhand live off",
    "silent": "grown = torch.ones(1 << 20, device='cuda')",
    "wrong name": "%unhand free modle",
    "wrong word": "%unhand repot",
    "free model": "%unhand free model optimizer losses",
    "freed": "repr(model[0].weight), torch.ones(3, device='cuda').sum().item()",
    "compact": "%unhand compact --dry-run",
    "no footer of its own": "%%time\n%%unhand\nawait asyncio.sleep(0)",
    "value": "answer = %unhand report\ntype(answer).__name__",
    "gone": "%unload_ext unhand\n%unhand report",
}

ran = {}


def outputs(name):
    """What a cell showed; the notebook runs once."""
    if not ran:
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
        client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", allow_errors=True)
        client.execute()
        if path := os.environ.get("UNHAND_NOTEBOOK"):
            nbformat.write(notebook, path)
        ran.update(zip(CELLS, notebook.cells))
    return ran[name].outputs


def bundles(name):
    """The (text, HTML) of what a cell showed richly."""
    found = []
    for output in outputs(name):
        data = output.get("data", {})
        if "text/html" in data:
            found.append((data["text/plain"], data["text/html"]))
    return found


def text(name):
    """All plain text of a cell."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", []))
        for output in outputs(name)
    )


if __name__ == "__main__" and len(sys.argv) > 1 and sys.argv[1] == "show":
    for name in CELLS:
        print("=====", name)
        print(CELLS[name])
        print("-----")
        print(text(name))
    sys.exit()


if __name__ == "__main__":
    main(globals())
