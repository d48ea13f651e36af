"""Everyday situations in which PyTorch or a library keeps the memory: graphs, optimizers, workspaces, pools, fragments."""

import copy
import threading
import weakref

import torch
from everyday import MIB, Trainer, build_model, make_batch, situation
from torch import nn

# --- training -------------------------------------------------------------------------------------------------------


@situation(names="model")
def situation_just_deleted(user):
    """Nothing else has it: the case for which the usual recipe is made."""
    user.model = build_model()


@situation(
    names="model", holder="optimizer", kinds=("optimizer state",), stays=True, then="optimizer",
)
def situation_optimizer_forgotten(user):
    """The model is deleted, Adam is not: its state is twice the model, and it has the parameters too."""
    user.model = build_model(2)
    user.optimizer = torch.optim.Adam(user.model.parameters())
    user.model(make_batch()).square().mean().backward()
    user.optimizer.step()


@situation(names="model", holder="trainer optimizer", kinds=("optimizer state",), stays=True, then="trainer")
def situation_trained_and_deleted(user):
    """After training the user deletes the model; the trainer has it, and the optimizer with gradients and state."""
    user.model = build_model(1)
    user.trainer = Trainer(user.model, torch.optim.AdamW(user.model.parameters()))
    for _ in range(2):
        user.trainer.step(make_batch())


@situation(
    names="optimizer", targets="[parameter.grad for parameter in model.parameters()]", holder="model",
    kinds=("gradients",), keeps_bytes=256 * MIB,
)
def situation_gradients_kept(user):
    """Training is over, the model stays for inference, and so do its gradients."""
    user.model = build_model()
    user.optimizer = torch.optim.SGD(user.model.parameters(), 0.1)
    user.model(make_batch()).square().mean().backward()
    user.optimizer.step()


@situation(holder="optimizer", kinds=("optimizer state",), targets="optimizer")
def situation_half_moved_optimizer(user):
    """`model.cpu()` to make room; Adam's state does not move with it."""
    user.model = build_model(2)
    user.optimizer = torch.optim.Adam(user.model.parameters())
    user.model(make_batch()).square().mean().backward()
    user.optimizer.step()
    user.model.cpu()


@situation(names="model, batch", holder="history", kinds=("autograd graph",), stays=True, then="history")
def situation_loss_history(user):
    """Losses are kept for a plot, with the graphs that hang on them."""
    user.model = build_model(1)
    user.history = []
    for _ in range(4):
        user.batch = make_batch()
        user.history.append(user.model(user.batch).tanh().mean())


@situation(names="model, batch, loss", holder="total", kinds=("autograd graph",), stays=True, then="total")
def situation_running_total(user):
    """A running total for the log line depends on every step."""
    user.model = build_model(1)
    user.total = 0.0
    for _ in range(4):
        user.batch = make_batch()
        user.loss = user.model(user.batch).tanh().mean()
        user.total = user.total + user.loss


@situation(names="model, batch", holder="loss", kinds=("autograd graph",), stays=True, then="loss")
def situation_retained_graph(user):
    """`retain_graph=True` once silenced an error: after backward everything that was saved is still there."""
    user.model = build_model(2)
    user.batch = make_batch()
    user.loss = user.model(user.batch).tanh().square().mean()
    user.loss.backward(retain_graph=True)


@situation(names="model, batch", holder="outputs", kinds=("autograd graph",), stays=True, then="outputs")
def situation_outputs_on_the_host(user):
    """Inference without `no_grad`: the outputs were copied to the host, their graphs were not."""
    user.model = build_model(1).eval()
    user.outputs = []
    for _ in range(4):
        user.batch = make_batch()
        user.outputs.append(user.model(user.batch).tanh()[:, :4].cpu())


@situation(names="weight")
def situation_gradient_penalty(user):
    """`backward(create_graph=True)` makes a ring through C++, which no collection finds."""
    user.weight = nn.Parameter(torch.randn(8192, 4096, device="cuda"))
    user.weight.tanh().sum().backward(create_graph=True)
    # The object outlives its last name, since the ring owns it, and a weak reference still leads to it.
    weight = weakref.ref(user.weight)

    def end():
        if weight() is not None:
            weight().grad = None

    return end


@situation(names="model, optimizer", holder="ema", kinds=("parameters", "attribute"), stays=True, then="ema")
def situation_averaged_copy(user):
    """A running average of the weights is a deep copy of the model."""

    class Average:
        def __init__(self, model):
            self.module = copy.deepcopy(model)

    user.model = build_model()
    user.optimizer = torch.optim.SGD(user.model.parameters(), 0.1)
    user.ema = Average(user.model)


@situation(names="batch", targets="model", holder="model", kinds=("attribute", "container"))
def situation_plain_attributes(user):
    """`model.cpu()` moves parameters and buffers. Masks and tables are plain attributes."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(1024, 1024)
            self.mask = torch.zeros(4096, 4096, device="cuda")
            self.tables = {name: torch.zeros(4096, 4096, device="cuda") for name in ("cos", "sin")}

    user.model = nn.Sequential(Attention()).cuda()
    user.batch = make_batch(8, 1024)
    user.model.cpu()


# --- libraries and the allocator ------------------------------------------------------------------------------------


@situation(names="streams, left, right", holder="cuBLAS", kinds=("workspace",), alone=True)
def situation_workspaces_of_streams(user):
    """Products on eight streams: a workspace for each, kept for the next product."""
    user.streams = [torch.cuda.Stream() for _ in range(8)]
    user.left = torch.zeros(512, 512, device="cuda")
    torch.cuda.synchronize()
    for stream in user.streams:
        with torch.cuda.stream(stream):
            user.right = user.left @ user.left
    torch.cuda.synchronize()


@situation(holder="cuBLAS", kinds=("workspace",), alone=True)
def situation_workspaces_of_threads(user):
    """Eight threads each did a product and ended; each had a handle and a workspace of its own."""
    together = threading.Barrier(8)

    def infer():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            matrix = torch.zeros(512, 512, device="cuda")
            together.wait()
            matrix @ matrix
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=infer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@situation(names="spectrum", alone=True)
def situation_fft_plans(user):
    """Transforms of many lengths: cuFFT keeps a plan with its tables for each, outside of PyTorch's figures."""
    # Lengths with a large prime factor, whose plans need the largest tables.
    for index in range(12):
        user.spectrum = torch.fft.fft(torch.zeros((1 << 20) + 2 * index + 1, dtype=torch.complex64, device="cuda"))
    torch.cuda.synchronize()


def capture(user):
    user.model = build_model(2)
    user.static_input = make_batch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        user.model(user.static_input)
    torch.cuda.current_stream().wait_stream(side)
    user.graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(user.graph):
        user.static_output = user.model(user.static_input)
    user.graph.replay()
    torch.cuda.synchronize()


@situation(
    names="model, static_input, static_output", holder="graph", kinds=("graph pool", "native", "global"), stays=True,
    then="graph",
)
def situation_captured_graph(user):
    """A captured graph is kept. Its private pool has all that the capture took."""
    capture(user)


@situation(
    names="model, static_input, graph", holder="static_output", kinds=("global", "graph pool"), stays=True,
    then="static_output",
)
def situation_output_of_a_graph(user):
    """The graph was deleted, its output was not, and keeps the private pool."""
    capture(user)


@situation(names="data", holder="pool", kinds=("graph pool", "global", "native"), stays=True, then="pool")
def situation_memory_pool(user):
    """Tensors from a `MemPool` were deleted: the pool keeps the segments, whatever `empty_cache` does."""
    user.pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(user.pool):
        user.data = [make_batch() for _ in range(4)]


@situation(
    names="blocks", holder="survivors", kinds=("container",), stays=True, is_fragmented=True,
    keeps_bytes=50 * 11 * MIB // 2,
)
def situation_large_fragments(user):
    """One large tensor in eight is still wanted. Each pins the segment that it is in."""
    user.blocks = [torch.empty(11 * MIB // 2, dtype=torch.uint8, device="cuda") for _ in range(400)]
    user.survivors = user.blocks[::8]
    del user.blocks[::8]


@situation(
    names="blocks", holder="survivors", kinds=("container",), stays=True, is_fragmented=True,
    keeps_bytes=128 * 64 * 1024,
)
def situation_small_fragments(user):
    """One small tensor in 32 is still wanted: 8 MiB pin 256."""
    user.blocks = [torch.empty(64 * 1024, dtype=torch.uint8, device="cuda") for _ in range(4096)]
    user.survivors = user.blocks[::32]
    del user.blocks[::32]


@situation(names="buffer", is_host=True, alone=True)
def situation_pinned_host_cache(user):
    """Pinned buffers of growing size: each is rounded up, cached, and never given back."""
    torch.cuda.init()
    for size in (20, 40, 80, 160):
        user.buffer = torch.empty(size * MIB, dtype=torch.uint8, pin_memory=True)


@situation(names="model, batch, output", holder="autocast", kinds=("cache",), alone=True)
def situation_autocast_cache(user):
    """An autocast region was entered by hand and never left: it has a half copy of each weight."""
    user.model = build_model(6)
    user.batch = make_batch(64)
    user.region = torch.autocast("cuda", dtype=torch.bfloat16)
    user.region.__enter__()
    user.output = user.model(user.batch).detach()
    region = user.region
    return lambda: region.__exit__(None, None, None)


@situation(names="fetched, batch", alone=True)
def situation_side_stream(user):
    """A prefetching stream: what it freed is cached for it, and does not serve the others."""
    user.side = torch.cuda.Stream()
    with torch.cuda.stream(user.side):
        user.fetched = [make_batch() for _ in range(3)]
    user.batch = make_batch()
    for tensor in user.fetched:
        tensor.record_stream(torch.cuda.current_stream())


@situation(names="batch", alone=True)
def situation_growing_lengths(user):
    """Each batch is longer than the last: a dead segment for each length."""
    for length in range(1, 9):
        user.batch = torch.zeros(length * 8 * MIB, dtype=torch.uint8, device="cuda")
