"""Training loops for `unhand.watch`: some that are clean, whatever their memory does, and some that leak, with the holder.

Each is a function of the watched steps. A clean one must never be told; of one that leaks the words have to be in the path
of the first holder, or the kind has to be the one that stands there.
"""

import asyncio
import collections
import concurrent.futures
import copy
import functools
import gc
import logging
import queue
import random
import threading
import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"


def net(width=128, depth=2):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to(DEVICE)


def batch(n=16, width=128):
    return torch.randn(n, width, device=DEVICE)


def big(n_bytes=1 << 20):
    return torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE)


# Clean


def plain(steps):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in steps:
        loss = model(batch()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adamw(steps):
    """State appears with the first step of the optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in steps:
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_accumulation(steps):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for index in steps:
        model(batch()).pow(2).mean().backward()
        if index % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()


def evaluation(steps):
    """Each tenth step gathers outputs, and the next one drops them."""
    model, outputs = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index in steps:
        outputs.clear()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if index % 10 == 9:
            outputs = [model(batch(256)).detach() for _ in range(8)]


def sequence_lengths(steps):
    model, random_ = net(), random.Random(0)
    for _ in steps:
        inputs = batch(random_.randrange(8, 4096))
        loss = model(inputs).pow(2).mean()
        loss.backward()
        model.zero_grad()


def key_value_cache(steps):
    """A token a step: the cache is made anew and longer, and dropped with each sequence."""
    random_ = random.Random(1)
    cache, left = None, 0
    for _ in steps:
        if left == 0:
            cache, left = None, random_.randrange(100, 250)
        token = batch(1, 1024)
        cache = token if cache is None else torch.cat([cache, token])
        left -= 1


def warm_up_and_logging(steps):
    model, log = net(), []
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    for index in steps:
        loss = model(batch()).pow(2).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if index % 10 == 0:
            log.append(loss.item())


def moving_average(steps):
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    for index in steps:
        model(batch()).pow(2).mean().backward()
        model.zero_grad()
        if index > 20:
            average.update_parameters(model)


def checkpoints(steps):
    """Copies of the model each 25 steps, the last three are kept."""
    model, kept = net(), []
    for index in steps:
        model(batch()).pow(2).mean().backward()
        model.zero_grad()
        if index % 25 == 24:
            kept.append(copy.deepcopy(model.state_dict()))
            del kept[:-3]


def two_optimizers(steps):
    generator, critic = net(), net()
    of_generator, of_critic = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    for index in steps:
        fake = generator(batch())
        (critic(batch()).mean() - critic(fake.detach()).mean()).backward()
        of_critic.step()
        of_critic.zero_grad()
        if index % 5 == 0:
            critic(generator(batch())).mean().backward()
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()


def recomputation(steps):
    model = net()
    for _ in steps:
        checkpoint(model, batch().requires_grad_(), use_reentrant=False).pow(2).mean().backward()
        model.zero_grad()


def mixed_precision(steps):
    model, scaler = net(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in steps:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def graph_replays(steps):
    model, inputs = net(), batch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = model(inputs)
    for _ in steps:
        inputs.copy_(batch())
        graph.replay()
        outputs.sum()


def truncated_backpropagation(steps):
    cell, state = nn.Linear(256, 128).to(DEVICE), torch.zeros(16, 128, device=DEVICE)
    for _ in steps:
        state = cell(torch.cat([batch(), state.detach()], 1)).tanh()
        state.pow(2).mean().backward()
        cell.zero_grad()


def data_loader(steps):
    data = torch.utils.data.TensorDataset(torch.randn(2000, 128))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
    model, batches = net(), iter(())
    for _ in steps:
        found = next(batches, None)
        if found is None:
            batches = iter(loader)
            found = next(batches)
        model(found[0].to(DEVICE, non_blocking=True)).pow(2).mean().backward()
        model.zero_grad()


def replay_buffer(steps):
    """Fills for 250 steps, then each new entry takes the place of the oldest."""
    buffer, random_ = collections.deque(maxlen=250), random.Random(2)
    for _ in steps:
        buffer.append(batch())
        torch.stack(random_.choices(buffer, k=8)).sum()


def ring_buffer(steps):
    buffer = torch.zeros(300, 16, 128, device=DEVICE)
    for index in steps:
        buffer[index % 300] = batch()


def bounded_cache(steps):
    @functools.lru_cache(maxsize=200)
    def positions(n):
        return torch.zeros(n + 1, 64, device=DEVICE)

    for index in steps:
        positions(index % 1000).sum()


def lazy_cache(steps):
    """Lengths that were not seen before get a mask, which is kept: ever more seldom."""
    masks, random_ = {}, random.Random(3)
    for _ in steps:
        n = random_.randrange(1, 40)
        if n not in masks:
            masks[n] = torch.zeros(n, n, device=DEVICE)


def curriculum(steps):
    """The batch grows each 40 steps, in eight stages."""
    model = net()
    for index in steps:
        inputs = batch(16 * (1 + min(7, index // 40)))
        loss = model(inputs).pow(2).mean()
        loss.backward()
        model.zero_grad()


def smooth_curriculum(steps):
    """The batch grows with each step, 300 times."""
    model = net()
    for index in steps:
        inputs = batch(16 + min(300, index))
        model(inputs).pow(2).mean().backward()
        model.zero_grad()


def mixed_sizes(steps):
    random_ = random.Random(4)
    kept = []
    for _ in steps:
        kept = [big(random_.choice([512, 4096, 1 << 16, 1 << 20, 3 << 20])) for _ in range(random_.randrange(1, 9))]
    del kept


def epoch_metrics(steps):
    """A list of losses that is cleared after each 60 steps."""
    model, losses = net(), []
    for index in steps:
        if index % 60 == 0:
            losses.clear()
        losses.append(model(batch()).pow(2).mean().detach())


def episodes(steps):
    """Log-probabilities with their graphs, until an episode of random length ends."""
    policy, random_ = net(), random.Random(5)
    kept, left = [], 0
    for _ in steps:
        if left == 0:
            if kept:
                torch.stack(kept).sum().backward()
                policy.zero_grad()
            kept, left = [], random_.randrange(5, 80)
        kept.append(policy(batch()).mean())
        left -= 1


def prefetching(steps):
    waiting = collections.deque(batch(64) for _ in range(4))
    model = net()
    for _ in steps:
        waiting.append(batch(64))
        model(waiting.popleft()).pow(2).mean().backward()
        model.zero_grad()


def gradient_penalty(steps):
    """Second derivatives, with gradients set to None as they should be."""
    model = net()
    for _ in steps:
        inputs = batch().requires_grad_()
        gradient, = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        gradient.pow(2).sum().backward()
        model.zero_grad(set_to_none=True)


CLEAN = (
    plain, adamw, gradient_accumulation, evaluation, sequence_lengths, key_value_cache, warm_up_and_logging, moving_average,
    checkpoints, two_optimizers, recomputation, mixed_precision, graph_replays, truncated_backpropagation, data_loader,
    replay_buffer, ring_buffer, bounded_cache, lazy_cache, curriculum, smooth_curriculum, mixed_sizes, epoch_metrics,
    episodes, prefetching, gradient_penalty,
)


# Leaking


def running_sum(steps):
    model, total = net(), 0
    for _ in steps:
        total = total + model(batch()).pow(2).mean()


def loss_history(steps):
    model, history = net(), []
    for _ in steps:
        loss = model(batch()).pow(2).mean()
        loss.backward()
        model.zero_grad()
        history.append(loss.detach())


def host_copies_with_graphs(steps):
    model, outputs = net(), []
    for _ in steps:
        outputs.append(model(batch()).cpu())


def recurrent_state(steps):
    cell, state = nn.Linear(256, 128).to(DEVICE), torch.zeros(16, 128, device=DEVICE)
    for _ in steps:
        state = cell(torch.cat([batch(), state], 1)).tanh()


def retained_graphs(steps):
    model, losses = net(), []
    for _ in steps:
        loss = model(batch()).pow(2).mean()
        loss.backward(retain_graph=True)
        losses.append(loss)
        model.zero_grad()


def second_derivatives(steps):
    """The gradient refers to the graph that refers to the parameter: a cycle through native code."""
    for _ in steps:
        parameter = nn.Parameter(torch.zeros(1024, device=DEVICE))
        parameter.tanh().sum().backward(create_graph=True)


def hook_that_gathers(steps):
    model, seen = net(), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    for _ in steps:
        model(batch()).sum()


def attribute_of_a_module(steps):
    model = net()
    model.features = []
    model[0].register_forward_hook(lambda module, inputs, output: model.features.append(output.detach()))
    for _ in steps:
        model(batch()).sum()


def logged_tensors(steps):
    model, metrics = net(), collections.defaultdict(list)
    for _ in steps:
        metrics["train/loss"].append(model(batch()).pow(2).mean())


class Metric:
    def __init__(self):
        self.predictions = []

    def update(self, prediction):
        self.predictions.append(prediction)


def metric(steps):
    model, accuracy = net(), Metric()
    for _ in steps:
        accuracy.update(model(batch()).argmax(1))


def unbounded_queue(steps):
    requests = queue.Queue()
    for _ in steps:
        requests.put({"inputs": batch()})


def futures(steps):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        jobs = []
        for _ in steps:
            jobs.append(pool.submit(batch))
            jobs[-1].result()


@functools.lru_cache(maxsize=None)
def positions(n):
    return torch.zeros(n + 1, 8, device=DEVICE)


def unbounded_cache(steps):
    positions.cache_clear()
    for index in steps:
        positions(index).sum()
    positions.cache_clear()


class Trainer:
    def __init__(self):
        self.model, self.outputs = net(), []

    def training_step(self):
        loss = self.model(batch()).pow(2).mean()
        self.outputs.append({"loss": loss.detach()})
        return loss


def trainer_outputs(steps):
    trainer = Trainer()
    for _ in steps:
        trainer.training_step().backward()


def exceptions(steps):
    def fails():
        activation = batch(64)
        raise ValueError(f"not finite: {tuple(activation.shape)}")

    errors = []
    for _ in steps:
        try:
            fails()
        except ValueError as error:
            errors.append(error)


def log_records(steps):
    records = []

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append(record)

    def fails():
        activation = batch(64)
        raise ValueError(f"not finite: {tuple(activation.shape)}")

    logger = logging.getLogger("loops")
    logger.propagate = False
    logger.addHandler(Keeping())
    for _ in steps:
        try:
            fails()
        except ValueError:
            logger.exception("step failed")
    logger.handlers.clear()


def views(steps):
    model, logs = net(), []
    for _ in steps:
        logs.append(model(batch()).detach()[0, :4])


def weak_keys(steps):
    plans = {}
    for index in steps:
        key = batch(1)
        plans[index] = (weakref.ref(key), key * 2)


SESSIONS = {}


def sessions(steps):
    for index in steps:
        SESSIONS[f"tab {index}"] = {"model": net(64, 1)}
    SESSIONS.clear()


def adapters(steps):
    model = net()
    for index in steps:
        model.add_module(f"adapter_{index}", nn.Linear(16, 16).to(DEVICE))


def growing_tensor(steps):
    """Nothing is gathered: the tensor is made anew, and larger."""
    model, predictions = net(), torch.zeros(0, 128, device=DEVICE)
    for _ in steps:
        predictions = torch.cat([predictions, model(batch()).detach()])


def failed_tasks(steps):
    async def request():
        activation = batch(64)
        raise ValueError(f"not finite: {tuple(activation.shape)}")

    async def serve():
        tasks = []
        for _ in steps:
            tasks.append(asyncio.create_task(request()))
            await asyncio.wait(tasks[-1:])
        for task in tasks:
            task.exception()

    asyncio.run(serve())


def generators(steps):
    def lazily():
        activation = batch(64)
        yield 0
        yield activation

    pending = []
    for _ in steps:
        pending.append(lazily())
        next(pending[-1])


class Module(nn.Module):
    seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return x


def class_attribute(steps):
    module = Module()
    for _ in steps:
        module(batch())
    Module.seen.clear()


def cycles(steps):
    """Modules that refer to themselves, with the collector switched off."""

    class Selfish(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16).to(DEVICE)
            self.which = self.forward

        def forward(self, x):
            return self.linear(x)

    gc.collect()
    gc.disable()
    try:
        for _ in steps:
            Selfish()(batch(4, 16))
    finally:
        gc.enable()
        gc.collect()


def optimizer_groups(steps):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(64, device=DEVICE))])
    for _ in steps:
        parameter = nn.Parameter(torch.zeros(256, device=DEVICE))
        optimizer.add_param_group({"params": [parameter]})
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def each_tenth_step(steps):
    model, validation = net(), []
    for index in steps:
        model(batch()).pow(2).mean().backward()
        model.zero_grad()
        if index % 10 == 9:
            validation.append(model(batch()).detach())


def in_noise(steps):
    """A number of 512 bytes a step, below megabytes that come and go."""
    model, random_, scores = net(), random.Random(6), []
    for _ in steps:
        inputs = batch(random_.randrange(1, 4096))
        scores.append(model(inputs).mean().detach())


def another_thread(steps):
    inbox, done = queue.Queue(), queue.Queue()

    def consume():
        received = []
        while (item := inbox.get()) is not None:
            received.append(item)
            done.put(True)

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in steps:
        inbox.put(batch())
        done.get()
    inbox.put(None)
    thread.join()


def callbacks(steps):
    model, on_end = net(), []
    for _ in steps:
        output = model(batch()).detach()
        on_end.append(lambda output=output: output.sum())


LEAKING = (
    (running_sum, "local `total`"),
    (loss_history, "local `history`"),
    (host_copies_with_graphs, "local `outputs`"),
    (recurrent_state, "local `state`"),
    (retained_graphs, "local `losses`"),
    (second_derivatives, "through .grad"),
    (hook_that_gathers, "seen"),
    (attribute_of_a_module, ".features"),
    (logged_tensors, "local `metrics`"),
    (metric, "local `accuracy`.predictions"),
    (unbounded_queue, "local `requests`"),
    (futures, "local `jobs`"),
    (unbounded_cache, "positions"),
    (trainer_outputs, "local `trainer`.outputs"),
    (exceptions, "local `errors`"),
    (log_records, "records"),
    (views, "local `logs`"),
    (weak_keys, "local `plans`"),
    (sessions, "SESSIONS"),
    (adapters, "local `model`"),
    (growing_tensor, "local `predictions`"),
    (failed_tasks, "local `tasks`"),
    (generators, "local `pending`"),
    (class_attribute, "Module.seen"),
    (cycles, "dead cycles"),
    (optimizer_groups, "local `optimizer`"),
    (each_tenth_step, "local `validation`"),
    (in_noise, "local `scores`"),
    (another_thread, "local `received`"),
    (callbacks, "local `on_end`"),
)
