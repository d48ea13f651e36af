"""The programs that coverage.py looks into: what people run, with random weights, since nothing can be downloaded.

A program calls `probe(moment)` where a report is to be taken. It is written as a user would write it: what its names
keep alive is part of what is measured.
"""

import contextlib
import os
import tempfile

# Before the first import of a library that would ask a hub, or show bars.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
from torch import nn


class Skip(Exception):
    """A reason why a program cannot run here."""


def need(name):
    """A module, or a reason to skip the program."""
    try:
        return __import__(name)
    except Exception as error:
        raise Skip(f"{name} cannot be imported: {error}") from error


def build_gpt2(probe, **changes):
    """GPT-2 small: 124 million parameters, the attention that transformers chooses."""
    if probe.is_small:
        changes = {"n_layer": 4, **changes}
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(**changes)
    with torch.device("cuda"):
        return transformers.GPT2LMHeadModel(config)


def middle_of(model):
    """The layer in the middle of a GPT-2."""
    return model.transformer.h[len(model.transformer.h) // 2]


def tokens(probe):
    """A batch of token ids."""
    return torch.randint(50_000, (2, 128) if probe.is_small else (8, 1024), device="cuda")


def train(probe, optimizer, middle, losses, scaler=None, before=""):
    """Three steps. In the third there is a report in the middle of forward, before backward, in it, and after each call.

    `losses` computes the loss of a step; `middle` is the layer in whose hook the report of forward is taken.
    """
    for step in range(3):
        handles = []
        if step == 2:
            handles.append(middle.register_forward_hook(look_into(probe, before)))
        loss = losses()
        if step == 2:
            probe(f"{before}between forward and backward")
        (scaler.scale(loss) if scaler else loss).backward()
        if step == 2:
            probe(f"{before}after backward")
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if step == 2:
            probe(f"{before}after the optimizer's step")
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
    probe(f"{before}after zero_grad")


def look_into(probe, before):
    """A hook of forward that takes a report, and another one when the gradient of its output is there."""
    moments = {"in the middle of forward", "in the middle of backward"}

    def report(moment):
        # Checkpoints run forward twice.
        if moment in moments:
            moments.discard(moment)
            probe(before + moment)

    def of_gradient(gradient):
        report("in the middle of backward")

    def of_forward(module, args, output):
        report("in the middle of forward")
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(of_gradient)

    return of_forward


def program_gpt2_adamw(probe):
    model = build_gpt2(probe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(probe)
    train(probe, optimizer, middle_of(model), lambda: model(input_ids=batch, labels=batch).loss)


def program_gpt2_fused_adamw_accumulated(probe):
    """The usual names in a loop (`outputs` keeps the logits), and two batches for a step."""
    model = build_gpt2(probe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = tokens(probe)
    history = []
    for step in range(4):
        outputs = model(input_ids=batch, labels=batch)
        history.append(outputs.loss.detach())
        outputs.loss.backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step >= 2:
            probe(f"after step {step}")


def program_gpt2_autocast(probe):
    model = build_gpt2(probe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(probe)

    def losses():
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=batch, labels=batch).loss

    train(probe, optimizer, middle_of(model), losses)


def program_gpt2_autocast_inference(probe):
    """Without a graph nothing of Python's leads to the copies of weights that autocast keeps."""
    model = build_gpt2(probe).eval()
    batch = tokens(probe)
    handle = middle_of(model).register_forward_hook(lambda *_: probe("in the middle of forward"))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        outputs = model(input_ids=batch)
        probe("after forward, inside autocast")
    handle.remove()
    probe("after autocast")
    del outputs


def program_gpt2_checkpoint(probe):
    model = build_gpt2(probe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(probe)
    for is_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        before = "reentrant: " if is_reentrant else "not reentrant: "
        model.train()
        if is_reentrant:
            model.enable_input_require_grads()
        losses = lambda: model(input_ids=batch, labels=batch, use_cache=False).loss
        train(probe, optimizer, middle_of(model), losses, before=before)


def program_gpt2_eager_attention(probe):
    model = build_gpt2(probe, attn_implementation="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    batch = tokens(probe)
    train(probe, optimizer, middle_of(model), lambda: model(input_ids=batch, labels=batch).loss)


def program_gpt2_offloaded_activations(probe):
    """Saved tensors are packed to the host by hooks: the report must not fetch them."""
    model = build_gpt2(probe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(probe)

    def losses():
        with torch.autograd.graph.save_on_cpu(pin_memory=False):
            return model(input_ids=batch, labels=batch).loss

    train(probe, optimizer, middle_of(model), losses)


class Adapter(nn.Module):
    """A low-rank change beside a frozen layer."""

    def __init__(self, layer, rank=16):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        n_outputs, n_inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        self.down = nn.Linear(n_inputs, rank, bias=False, device="cuda")
        self.up = nn.Linear(rank, n_outputs, bias=False, device="cuda")

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x)) * 2.0


def program_gpt2_adapters(probe):
    model = build_gpt2(probe).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapter(block.attn.c_attn)
        block.mlp.c_fc = Adapter(block.mlp.c_fc)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    batch = tokens(probe)
    train(probe, optimizer, middle_of(model), lambda: model(input_ids=batch, labels=batch).loss)


def program_gpt2_generate(probe):
    """Greedy, with the cache of keys and values that transformers makes."""
    transformers = need("transformers")
    model = build_gpt2(probe).eval()
    n_new = 24 if probe.is_small else 200
    prompt = tokens(probe)[:, : 16 if probe.is_small else 256]

    class Middle(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            # On the stand-in, where nothing is compared, generation ends after one token.
            if input_ids.shape[1] == prompt.shape[1] + (1 if probe.is_small else n_new // 2):
                probe("in the middle of generate")
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    criteria = transformers.StoppingCriteriaList([Middle()])
    options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(prompt, stopping_criteria=criteria, **options)
    probe("after generate")
    answer = model.generate(prompt, return_dict_in_generate=True, use_cache=True, **options)
    probe("with the cache returned")
    del answer


def program_gpt2_static_cache(probe):
    """One cache of a fixed size, and a forward for each token."""
    transformers = need("transformers")
    model = build_gpt2(probe).half().eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=1024)
    batch = tokens(probe)[:, :64]
    with torch.inference_mode():
        logits = model(batch, past_key_values=cache).logits
        for _ in range(4):
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
        probe("after four tokens")


def program_resnet50(probe):
    """Mixed precision with a scaler, channels last."""
    models = need("torchvision.models")
    model = models.models.resnet50().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    n_images = 8 if probe.is_small else 128
    images = torch.randn(n_images, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (n_images,), device="cuda")

    def losses():
        with torch.autocast("cuda", torch.float16):
            return nn.functional.cross_entropy(model(images), labels)

    train(probe, optimizer, model.layer3, losses, scaler)


def program_vit_single_precision(probe):
    models = need("torchvision.models")
    model = models.models.vit_b_16().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_images = 4 if probe.is_small else 64
    images = torch.randn(n_images, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (n_images,), device="cuda")
    middle = model.encoder.layers[6]
    train(probe, optimizer, middle, lambda: nn.functional.cross_entropy(model(images), labels))


def program_lstm(probe):
    """cuDNN's recurrent layers, with the state of its dropout."""
    embed, head = nn.Embedding(20_000, 512).cuda(), nn.Linear(1024, 20_000).cuda()
    layers = nn.LSTM(512, 1024, num_layers=4, dropout=0.1, batch_first=True).cuda()
    model = nn.ModuleList([embed, layers, head])
    optimizer = torch.optim.Adam(model.parameters())
    words = torch.randint(20_000, (4, 32) if probe.is_small else (64, 256), device="cuda")

    def losses():
        hidden, _ = layers(embed(words))
        return nn.functional.cross_entropy(head(hidden).flatten(0, 1), words.flatten())

    train(probe, optimizer, layers, losses)


@contextlib.contextmanager
def group_of_one():
    """A process group with one member."""
    import torch.distributed as dist

    if not dist.is_available():
        raise Skip("this PyTorch has no torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def program_gpt2_ddp(probe):
    with group_of_one():
        for is_view in (False, True):
            before = "gradients are views of buckets: " if is_view else ""
            train_ddp(probe, before, gradient_as_bucket_view=is_view)


def train_ddp(probe, before, **options):
    model = build_gpt2(probe)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0], **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    batch = tokens(probe)
    if not before:
        probe("before the first step")
    losses = lambda: wrapped(input_ids=batch, labels=batch).loss
    train(probe, optimizer, middle_of(model), losses, before=before)


def program_gpt2_fsdp(probe):
    with group_of_one():
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError as error:
            raise Skip(f"no fully_shard: {error}") from error
        model = build_gpt2(probe)
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = tokens(probe)
        train(probe, optimizer, middle_of(model), lambda: model(input_ids=batch, labels=batch).loss)


def program_gpt2_compiled(probe):
    """The model as one compiled graph; no hook, since one would break the graph."""
    model = build_gpt2(probe, n_layer=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(probe)
    compiled = torch.compile(model)
    for step in range(3):
        try:
            loss = compiled(input_ids=batch, labels=batch).loss
        except Exception as error:
            raise Skip(f"torch.compile does not run here: {' '.join(str(error).split())[:300]}") from error
        if step == 2:
            probe("between forward and backward")
        loss.backward()
        if step == 2:
            probe("after backward")
        optimizer.step()
        optimizer.zero_grad()
    probe("after zero_grad")


def program_compiled_with_cuda_graphs(probe):
    """`mode="reduce-overhead"`: inductor keeps the graphs' memory in a pool of its own."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)]).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    batch = torch.randn(4096, 2048, device="cuda")
    output = None
    with torch.inference_mode():
        for _ in range(5):
            try:
                torch.compiler.cudagraph_mark_step_begin()
                output = compiled(batch)
            except Exception as error:
                raise Skip(f"torch.compile does not run here: {' '.join(str(error).split())[:300]}") from error
    probe("after five calls")
    del output


def program_captured_inference(probe):
    """A CUDA graph by hand, with static inputs and outputs."""
    model = build_gpt2(probe).half().eval()
    static_input = tokens(probe)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                model(input_ids=static_input, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_output = model(input_ids=static_input, use_cache=False).logits
        probe("after capture")
        for _ in range(3):
            graph.replay()
        probe("after replay")
        del static_output
        probe("without the output")


def program_odd_graphs(probe):
    """Autograd graphs of uncommon nodes: what each one saved is all that there is."""
    # As many bytes a tensor as to see from the size which one is missing.
    make = lambda n=1: torch.randn(1024, 1024 * n, device="cuda", requires_grad=True)
    kept = []
    x = make()
    y = x * 1
    y[:512].mul_(torch.sin(make()[:512]))
    kept.append(y)
    probe("a view changed in place by a product")
    y = x * 1
    y[:512] = torch.exp(make()[:512])
    kept.append(y)
    probe("a part assigned")
    kept.append(torch.cat([torch.exp(make()), torch.exp(make())]).pow(2))
    kept.append(torch.stack([torch.exp(make()) for _ in range(3)]))
    probe("cat and stack")
    kept.append(make()[torch.randint(1024, (1024,), device="cuda")])
    kept.append(torch.einsum("ij,jk,kl->il", make(), make(), make()))
    probe("index and einsum")
    kept.append(torch._foreach_exp([make(), make()]))
    kept.append(torch._foreach_mul([make(), make()], [torch.exp(make()), torch.exp(make())]))
    probe("foreach")
    kept.append(nn.functional.scaled_dot_product_attention(*[make().view(1, 16, 1024, 64) for _ in range(3)], dropout_p=0.1))
    probe("attention in single precision")
    kept.append(nn.functional.scaled_dot_product_attention(*[make().half().view(1, 16, 1024, 64) for _ in range(3)], is_causal=True))
    probe("attention in half precision")
    kept.append(torch.func.vmap(lambda a: torch.exp(a).sum())(make()))
    probe("vmap")
    first = make()
    (once,) = torch.autograd.grad(torch.exp(first).pow(2).sum(), first, create_graph=True)
    kept.append(once.pow(2).sum())
    probe("twice differentiable")
    kept.append(nn.functional.multi_head_attention_forward(
        make().view(1024, 4, 256), make().view(1024, 4, 256), make().view(1024, 4, 256), 256, 4,
        torch.randn(768, 256, device="cuda", requires_grad=True), None, None, None, False, 0.1,
        torch.randn(256, 256, device="cuda", requires_grad=True), None)[0])
    probe("multi-head attention")
    kept.append(torch.linalg.svd(make()[:256, :256]))
    kept.append(torch.fft.rfft2(make()).abs())
    probe("linear algebra and Fourier")
    kept.append(nn.functional.ctc_loss(
        make().view(1024, 16, 64).log_softmax(-1), torch.ones(16, 10, dtype=torch.long), torch.full((16,), 1024), torch.full((16,), 10)))
    kept.append(torch.sparse.mm(torch.eye(1024, device="cuda").to_sparse().requires_grad_(), make()))
    probe("loss of sequences, and sparse")
