"""Everyday situations in which Python keeps the memory: tracebacks, containers, closures, caches, threads, history."""

import asyncio
import collections
import functools
import gc
import logging
import logging.handlers
import queue
import sys
import threading
import types
import weakref

import torch
from everyday import MIB, Trainer, build_model, make_batch, situation
from torch import nn

# --- tracebacks -----------------------------------------------------------------------------------------------------


@situation(holder="activations", kinds=("traceback",), alone=True)
def situation_failed_call(user):
    """A call failed at the prompt, and the interpreter remembers the exception."""

    def train():
        model = build_model(2)
        activations = [model(make_batch()).detach() for _ in range(2)]
        raise RuntimeError(f"shape mismatch after {len(activations)} steps")

    try:
        train()
    except RuntimeError as error:
        # What the interpreter does after it has printed an uncaught exception.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error


@situation(holder="errors activations", kinds=("traceback",), alone=True)
def situation_stored_exception(user):
    """A sweep catches what goes wrong and stores it for the summary at the end."""
    user.errors = []

    def run(trial):
        activations = [make_batch() for _ in range(2)]
        raise ValueError(f"trial {trial}: loss is not finite after {len(activations)} batches")

    for trial in range(2):
        try:
            run(trial)
        except ValueError as error:
            user.errors.append((trial, error))


class NeedsTooMuch(torch.autograd.Function):
    """Its backward pass asks for more than any device has."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.empty(1 << 42, dtype=torch.uint8, device="cuda")[: x.numel()].view_as(x)


@situation(holder="last_error", kinds=("traceback",), alone=True)
def situation_chain_of_exceptions(user):
    """Backward ran out of memory; the runner wrapped the error and stripped its own traceback, not the cause's."""

    def step():
        model = build_model(2)
        hidden = NeedsTooMuch.apply(model(make_batch()))
        hidden.square().mean().backward()

    def attempt():
        try:
            step()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("step 17 failed") from error

    try:
        attempt()
    except RuntimeError as error:
        user.last_error = error.with_traceback(None)


@situation(holder="exc_info activations", kinds=("traceback",), alone=True)
def situation_logging_buffer(user):
    """A service logs failed requests into a buffer in memory; each record has the traceback."""
    user.logger = logging.getLogger("service")
    user.logger.propagate = False
    user.buffer = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)
    user.logger.addHandler(user.buffer)

    def answer():
        activations = [make_batch() for _ in range(2)]
        raise ValueError(f"no answer after {len(activations)} tries")

    for request in range(2):
        try:
            answer()
        except ValueError:
            user.logger.exception("request %d failed", request)

    return lambda: logging.getLogger("service").handlers.clear()


@situation(names="x", holder="Out", kinds=("notebook history",))
def situation_notebook_output(user):
    """A cell ended with a bare `x`: the notebook has it as `Out[2]`, `_`, `_2`."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        # Where a notebook has them: in the namespace of the user.
        user.x = [make_batch() for _ in range(4)]
        user.Out = {2: user.x}
        user._oh, user._, user._2 = user.Out, user.x, user.x
        return None
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(user_module=user)
    user.make_batch = make_batch
    out, sys.stdout = sys.stdout, open("/dev/null", "w")
    try:
        shell.run_cell("x = [make_batch() for _ in range(4)]", store_history=True)
        shell.run_cell("x", store_history=True)
    finally:
        sys.stdout.close()
        sys.stdout = out
    return end_shell


@situation(holder="activations", kinds=("traceback", "notebook history"), alone=True)
def situation_notebook_failed_cell(user):
    """A cell of a notebook failed: the shell keeps the exception in four places."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        return "IPython is not installed"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(user_module=user)

    def train():
        activations = [make_batch() for _ in range(4)]
        raise RuntimeError(f"shape mismatch after {len(activations)} steps")

    user.train = train
    out, sys.stdout = sys.stdout, open("/dev/null", "w")
    try:
        shell.run_cell("train()")
    finally:
        sys.stdout.close()
        sys.stdout = out
    return end_shell


def end_shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.reset()
    shell.InteractiveTB.tb = None
    shell.last_execution_result = None
    InteractiveShell.clear_instance()


# --- containers, closures, caches -----------------------------------------------------------------------------------


@situation(names="model", holder="trainer", kinds=("parameters", "attribute", "optimizer state"))
def situation_trainer_owns_model(user):
    """The user deletes the model; the trainer that was made with it is still there."""
    user.model = build_model()
    user.trainer = Trainer(user.model)


@situation(names="model, trainer", holder="", kinds=("dead cycle",), alone=True)
def situation_reference_cycle(user):
    """Trainer and callback know each other: deleting both names frees nothing until a collection."""
    user.model = build_model()
    user.trainer = Trainer(user.model)
    user.trainer.callbacks.append(functools.partial(setattr, user.trainer, "stopped"))


@situation(names="model, trainer", holder="", kinds=("dead cycle",), alone=True)
def situation_frozen_collector(user):
    """The same, after the framework has frozen the heap for speed: no collection finds it."""
    user.model = build_model()
    user.trainer = Trainer(user.model)
    user.trainer.callbacks.append(functools.partial(setattr, user.trainer, "stopped"))
    gc.collect()
    gc.freeze()


@situation(names="model", holder="positions", kinds=("cache",))
def situation_cached_function(user):
    """A cached helper has the model as its argument."""

    @functools.lru_cache(maxsize=8)
    def positions(model, length):
        return torch.arange(length)

    user.positions = positions
    user.model = build_model()
    user.positions(user.model, 128)


@situation(names="model", holder="on_epoch_end closure", kinds=("closure", "parameters"))
def situation_closure(user):
    """A callback closes over the model."""

    def make_callback(model):
        def on_epoch_end(epoch):
            return model.state_dict()

        return on_epoch_end

    user.model = build_model()
    user.callbacks = {"on_epoch_end": make_callback(user.model)}


@situation(names="model", holder="predict", kinds=("closure", "parameters", "attribute"))
def situation_partial(user):
    """`functools.partial` has the model bound as its first argument."""

    def forward(model, batch):
        return model(batch)

    user.model = build_model()
    user.predict = functools.partial(forward, user.model)


@situation(names="recorder, batch, output", holder="model hooks", kinds=("hook",))
def situation_forward_hook(user):
    """A recorder of activations is registered as a hook. The model, which is small, is wanted; the recorder is not."""

    class Recorder:
        def __init__(self):
            self.activations = collections.defaultdict(list)

        def __call__(self, module, inputs, output):
            self.activations[type(module).__name__].append(output)

    user.model = nn.Sequential(nn.GELU(), nn.Tanh())
    user.recorder = Recorder()
    for module in user.model:
        module.register_forward_hook(user.recorder)
    user.batch = make_batch()
    with torch.no_grad():
        for _ in range(2):
            user.output = user.model(user.batch)


@situation(names="model", holder="zoo _LOADED", kinds=("parameters", "container", "global"))
def situation_registry(user):
    """A library remembers every model that it loaded, in a global of its own module."""
    zoo = types.ModuleType("zoo")
    sys.modules["zoo"] = zoo
    zoo._LOADED = {}
    zoo._LOADED["base"] = user.model = build_model()
    return lambda: sys.modules.pop("zoo")


@situation(names="engine, model", holder="Engine", kinds=("class attribute", "parameters"))
def situation_class_attribute(user):
    """The engine is a singleton: its class has it."""

    class Engine:
        instance = None

        def __init__(self, model):
            self.model = model
            type(self).instance = self

    user.Engine = Engine
    user.model = build_model()
    user.engine = Engine(user.model)


@situation(names="model", holder="features", kinds=("cache", "container", "parameters", "attribute"))
def situation_weak_keys(user):
    """A dictionary with weak keys, whose value refers to its key."""

    class Features:
        def __init__(self, model):
            self.model = model

    user.model = build_model()
    user.features = weakref.WeakKeyDictionary()
    user.features[user.model] = Features(user.model)


@situation(names="frames", holder="thumbnails", kinds=("container",), stays=True, then="thumbnails")
def situation_small_views(user):
    """A corner of each frame is wanted, as a view: eight numbers keep 64 MiB."""
    user.frames = [make_batch() for _ in range(4)]
    user.thumbnails = [frame[:1, :8] for frame in user.frames]


@situation(names="model, trainer", holder="best", kinds=("container", "global"), stays=True, then="best")
def situation_best_weights(user):
    """The best weights so far are a dictionary of clones."""
    user.model = build_model()
    user.trainer = Trainer(user.model)
    user.best = {name: tensor.detach().clone() for name, tensor in user.model.state_dict().items()}


@situation(names="model, cache", holder="sessions", kinds=("attribute", "container", "cache"))
def situation_kv_cache(user):
    """The conversation has the key-value cache, which is no part of the model."""

    class KeyValueCache:
        def __init__(self, n_layers):
            self.keys = [torch.zeros(8, 16, 2048, 64, device="cuda") for _ in range(n_layers)]
            self.values = [torch.zeros(8, 16, 2048, 64, device="cuda") for _ in range(n_layers)]

    user.model = build_model(1)
    user.cache = KeyValueCache(2)
    user.sessions = {"a41f": {"history": [], "cache": user.cache}}


@situation(names="evaluator, batch", holder="results", kinds=("container", "attribute"), stays=True, then="results")
def situation_results_list(user):
    """Predictions are appended to a list, on the device."""
    user.results = []
    user.evaluator = nn.GELU()
    with torch.no_grad():
        for _ in range(4):
            user.batch = make_batch()
            user.results.append({"prediction": user.evaluator(user.batch), "score": 0.5})


# --- what has not ended ---------------------------------------------------------------------------------------------


@situation(names="model", holder="stream", kinds=("generator",), stays=True, then="stream")
def situation_suspended_generator(user):
    """A streaming answer was read halfway: the generator stands at its `yield` with the model and a state."""

    def generate(model, prompt):
        state = model(prompt).detach()
        for token in range(100):
            yield token
        return state

    user.model = build_model(2)
    with torch.no_grad():
        user.stream = generate(user.model, make_batch())
        next(user.stream)


@situation(holder="weights", kinds=("thread",), stays=True)
def situation_thread_local(user):
    """A worker thread waits for work with a tensor in a local variable."""
    ready, ended = threading.Event(), threading.Event()

    def serve():
        weights = [make_batch() for _ in range(4)]
        ready.set()
        ended.wait()
        return len(weights)

    user.worker = threading.Thread(target=serve, name="worker-0", daemon=True)
    user.worker.start()
    ready.wait()
    worker = user.worker
    return lambda: (ended.set(), worker.join())


@situation(names="loader, batch", holder="batch", kinds=("thread",), stays=True)
def situation_prefetch_queue(user):
    """A loader prefetches to the device. Its thread stands in `put()` with one batch more than the queue has room for."""
    ended = threading.Event()

    class Loader:
        def __init__(self):
            self.queue = queue.Queue(maxsize=3)
            self.thread = threading.Thread(target=prefetch, args=(self.queue,), name="prefetch", daemon=True)
            self.thread.start()

        def __next__(self):
            return self.queue.get()

    def prefetch(batches):
        while not ended.is_set():
            batch = make_batch()
            while not ended.is_set():
                try:
                    batches.put(batch, timeout=0.05)
                    break
                except queue.Full:
                    continue

    user.loader = Loader()
    user.batch = next(user.loader)
    thread, batches = user.loader.thread, user.loader.queue
    while not batches.full():
        threading.Event().wait(0.01)
    # Long enough for the thread to make the batch that does not fit.
    threading.Event().wait(0.2)
    del batches
    return lambda: (ended.set(), thread.join())


@situation(names="model", holder="cache", kinds=("task",), stays=True, then="session")
def situation_pending_task(user):
    """A task waits for the next message with the conversation's cache in a local variable."""

    async def chat(inbox):
        cache = [make_batch() for _ in range(4)]
        await inbox.get()
        return len(cache)

    async def start():
        inbox = asyncio.Queue()
        task = asyncio.ensure_future(chat(inbox))
        await asyncio.sleep(0)
        return inbox, task

    user.model = nn.GELU()
    user.loop = asyncio.new_event_loop()
    user.inbox, user.session = user.loop.run_until_complete(start())
    loop, session = user.loop, weakref.ref(user.session)

    def end():
        task = session()
        if task is not None:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    return end


@situation(names="pool", holder="futures", kinds=("container", "task"), stays=True, then="futures")
def situation_futures(user):
    """The results of a thread pool were used; the list of futures still has them."""
    from concurrent.futures import ThreadPoolExecutor

    user.pool = ThreadPoolExecutor(2)
    user.futures = [user.pool.submit(make_batch) for _ in range(4)]
    n_bytes = sum(future.result().nbytes for future in user.futures)
    assert n_bytes == 256 * MIB
    user.pool.shutdown()
