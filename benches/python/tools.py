"""The same two questions to each tool, asked the way its own documentation does: who holds this, and what is there.

Each function returns what the tool answered as (text to read, bytes that it says are held or None), and keeps nothing.
`hidden` gives the tensor that is asked about: whoever has it in a variable is a holder too.
"""

import contextlib
import io


def unhand_holders(hidden):
    import unhand

    found = unhand.holders(hidden())
    return str(found), found[0].bytes


def unhand_report():
    import unhand

    found = unhand.report()
    return str(found), sum(device.named_bytes for device in found.devices)


def objgraph_holders(hidden):
    import objgraph

    chain = objgraph.find_backref_chain(hidden(), objgraph.is_proper_module)
    text = io.StringIO()
    # Writes what it would draw, with the names of the references.
    objgraph.show_chain(chain, output=text)
    return text.getvalue(), None


def objgraph_report():
    import objgraph

    texts = []
    n_bytes = 0
    for kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        for tensor in objgraph.by_type(kind):
            if tensor.is_cuda:
                texts.append(objgraph_holders(lambda: tensor)[0])
                n_bytes += tensor.untyped_storage().nbytes()
    return "\n".join(texts), n_bytes


def guppy_holders(hidden):
    import guppy

    heap = guppy.hpy()
    asked = heap.iso(hidden())
    return str(asked.shpaths), asked.domisize


def guppy_report():
    import guppy
    import torch

    heap = guppy.hpy()
    tensors = heap.heap() & torch.Tensor
    return "\n".join(str(tensors.byid[at].shpaths) for at in range(tensors.count)), tensors.domisize


def memlab_holders(hidden):
    raise NotImplementedError("no such question")


def memlab_report():
    from pytorch_memlab import MemReporter

    reporter = MemReporter()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        reporter.report(verbose=True)
    # Its own sums are printed rounded, so its figures are added up here.
    return text.getvalue(), sum(
        n_bytes
        for device, rows in reporter.device_tensor_stat.items()
        if device.type == "cuda"
        for *_, n_bytes in rows
    )


QUESTIONS = {
    "unhand holders": unhand_holders,
    "unhand report": unhand_report,
    "objgraph holders": objgraph_holders,
    "objgraph report": objgraph_report,
    "guppy3 holders": guppy_holders,
    "guppy3 report": guppy_report,
    "pytorch_memlab report": memlab_report,
}
