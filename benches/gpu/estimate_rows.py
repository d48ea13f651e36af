"""The steps of `estimate.py`: each function runs one kind of work for some steps on the current CUDA device."""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

CUDA = "cuda"


def train(model, batch, loss_of, optimizer, steps, amp=None, scaler=None, clip=None, accumulate=1):
    """The loop that most programs have."""
    model.train()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            with torch.autocast(CUDA, dtype=amp, enabled=amp is not None):
                loss = loss_of(model, *batch())
            (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


# Convolutions


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * 4
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        is_same = stride == 1 and inputs == outputs
        self.side = nn.Identity() if is_same else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.main(x) + self.side(x), inplace=True)


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for index in range(count):
            layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = width * 4
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)).to(CUDA)


def images(n, size=224):
    return lambda: (torch.randn(n, 3, size, size, device=CUDA), torch.zeros(n, dtype=torch.long, device=CUDA))


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def resnet50_train(steps):
    model = resnet50()
    train(model, images(32), classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), steps)


def resnet50_train_amp(steps):
    model = resnet50().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, images(64), classify, optimizer, steps, amp=torch.bfloat16)


def resnet50_infer(steps):
    model = resnet50().eval()
    with torch.inference_mode():
        for _ in range(steps):
            model(*images(64)()[:1])


class Attend(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.heads = heads

    def forward(self, x):
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-1, -2).reshape(n, c, h, w))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, time_width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.time = nn.Linear(time_width, outputs)
        self.side = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.side(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width=64, time_width=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.first, self.width = nn.Conv2d(3, width, 3, 1, 1), width
        sizes = [width, width * 2, width * 4]
        self.down = nn.ModuleList(Residual(a, b, time_width) for a, b in zip([width, *sizes], sizes, strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle, self.attend = Residual(sizes[-1], sizes[-1], time_width), Attend(sizes[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(size, size, 2, 2) for size in reversed(sizes))
        pairs = zip(reversed(sizes), [*reversed(sizes[:-1]), width], strict=True)
        self.up = nn.ModuleList(Residual(size * 2, after, time_width) for size, after in pairs)
        self.last = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x, t):
        frequencies = torch.exp(-torch.arange(self.width // 2, device=x.device) / 8)
        angles = t[:, None] * frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, t)
            kept.append(x)
            x = shrink(x)
        x = self.attend(self.middle(x, t))
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), kept.pop()], 1), t)
        return self.last(x)


def unet_diffusion_train(steps):
    model = UNet().to(CUDA)

    def batch():
        return torch.randn(16, 3, 64, 64, device=CUDA), torch.rand(16, device=CUDA)

    def loss_of(model, x, t):
        noise = torch.randn_like(x)
        return F.mse_loss(model(x + noise * t[:, None, None, None], t), noise)

    train(model, batch, loss_of, torch.optim.AdamW(model.parameters(), 1e-4), steps, clip=1.0)


def gan_train(steps):
    def up(a, b, size=4, stride=2, pad=1):
        return [nn.ConvTranspose2d(a, b, size, stride, pad, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]

    def down(a, b):
        return [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True)]

    make = nn.Sequential(*up(100, 512, 4, 1, 0), *up(512, 256), *up(256, 128), *up(128, 64),
                         nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).to(CUDA)
    judge = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(64, 128), *down(128, 256),
                          *down(256, 512), nn.Conv2d(512, 1, 4), nn.Flatten()).to(CUDA)
    makes, judges = (torch.optim.Adam(model.parameters(), 2e-4) for model in (make, judge))
    ones, zeros = torch.ones(128, 1, device=CUDA), torch.zeros(128, 1, device=CUDA)
    for _ in range(steps):
        real, fake = torch.randn(128, 3, 64, 64, device=CUDA), make(torch.randn(128, 100, 1, 1, device=CUDA))
        judges.zero_grad()
        losses = [F.binary_cross_entropy_with_logits(judge(x), y) for x, y in ((real, ones), (fake.detach(), zeros))]
        sum(losses).backward()
        judges.step()
        makes.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        makes.step()


# Sequences


class Words(nn.Module):
    """An encoder over tokens, without anything but PyTorch."""

    def __init__(self, vocabulary=16_000, width=512, layers=6, length=256):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.last(self.body(self.words(x) + self.places))


def tokens(n, length):
    return lambda: (torch.zeros(n, length, dtype=torch.long, device=CUDA),)


def predict(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def transformer_train_adamw(steps):
    model = Words().to(CUDA)
    train(model, tokens(16, 256), predict, torch.optim.AdamW(model.parameters(), 1e-4), steps, clip=1.0)


def transformer_train_fp16_scaler(steps):
    model = Words().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    train(model, tokens(16, 256), predict, optimizer, steps, amp=torch.float16, scaler=torch.amp.GradScaler(CUDA))


def transformer_accumulate(steps):
    model = Words().to(CUDA)
    train(model, tokens(8, 256), predict, torch.optim.SGD(model.parameters(), 0.1), steps, accumulate=4)


def transformer_compiled(steps):
    model = Words(layers=2).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    train(torch.compile(model), tokens(16, 256), predict, optimizer, steps)


def lstm_train(steps):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(10_000, 512), nn.Linear(512, 10_000)
            self.body = nn.LSTM(512, 512, 2, batch_first=True, dropout=0.2)

        def forward(self, x):
            return self.last(self.body(self.words(x))[0])

    model = Model().to(CUDA)
    train(model, tokens(32, 128), predict, torch.optim.Adam(model.parameters(), 1e-3), steps, clip=0.5)


def embeddings_train(steps):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(200_000, 64, mode="sum", sparse=False) for _ in range(8))
            self.top = nn.Sequential(nn.Linear(8 * 64, 512), nn.ReLU(), nn.Linear(512, 1))

        def forward(self, x):
            return self.top(torch.cat([table(x) for table in self.tables], 1))

    model = Model().to(CUDA)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    train(model, tokens(2048, 10), lambda model, x: model(x).square().mean(), optimizer, steps)


def graph_captured_train(steps):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())]).to(CUDA)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True)
    x = torch.randn(256, 2048, device=CUDA)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        optimizer.step()
    for _ in range(steps):
        graph.replay()


# Models of `transformers`


def gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**changes)).to(CUDA)


def llama(width, layers, heads, inner, key_heads=None, vocabulary=32_000):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
                         num_key_value_heads=key_heads or heads, vocab_size=vocabulary)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    # Weights of any value: what they are does not change what is allocated, and filling billions takes long.
    model = model.to_empty(device=CUDA)
    return model


def label(model, x):
    return model(input_ids=x, labels=x).loss


def gpt2_train_adamw(steps):
    model = gpt2()
    train(model, tokens(8, 512), label, torch.optim.AdamW(model.parameters(), 1e-4), steps, clip=1.0)


def gpt2_train_bf16(steps):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    train(model, tokens(16, 512), label, optimizer, steps, amp=torch.bfloat16)


def llama_1b_lora(steps):
    model = llama(2048, 16, 32, 8192, 8)
    model.requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self, base, rank=16):
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.zeros(rank, base.in_features, device=CUDA, dtype=torch.bfloat16))
            self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=CUDA, dtype=torch.bfloat16))

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T

    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    parameters = [p for p in model.parameters() if p.requires_grad]
    train(model, tokens(4, 1024), label, torch.optim.AdamW(parameters, 1e-4), steps)


def llama_1b_checkpointing(steps):
    model = llama(2048, 16, 32, 8192, 8)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    train(model, tokens(4, 2048), label, torch.optim.AdamW(model.parameters(), 1e-5), steps)


def llama_7b_step(steps):
    model = llama(4096, 32, 32, 11_008)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    train(model, tokens(4, 2048), label, torch.optim.AdamW(model.parameters(), 1e-5), steps)


def llama_1b_generate(_):
    model = llama(2048, 16, 32, 8192, 8).eval()
    prompt = torch.ones(8, 512, dtype=torch.long, device=CUDA)
    with torch.inference_mode():
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, min_new_tokens=64,
                       do_sample=False, use_cache=True, pad_token_id=0)


# Several processes, of which there is one


def alone(run):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        run()
        torch.cuda.synchronize()
        dist.destroy_process_group()


def ddp_train(steps):
    def run():
        model = nn.parallel.DistributedDataParallel(Words().to(CUDA), device_ids=[0])
        train(model, tokens(16, 256), predict, torch.optim.AdamW(model.parameters(), 1e-4), steps)

    alone(run)


def fsdp_train(steps):
    from torch.distributed.fsdp import fully_shard

    def run():
        model = Words().to(CUDA)
        for layer in model.body.layers:
            fully_shard(layer)
        fully_shard(model)
        train(model, tokens(16, 256), predict, torch.optim.AdamW(model.parameters(), 1e-4), steps)

    alone(run)


ROWS = {function.__name__: function for function in (
    resnet50_train, resnet50_train_amp, resnet50_infer, unet_diffusion_train, gan_train, transformer_train_adamw,
    transformer_train_fp16_scaler, transformer_accumulate, transformer_compiled, lstm_train, embeddings_train,
    graph_captured_train, gpt2_train_adamw, gpt2_train_bf16, llama_1b_lora, llama_1b_checkpointing, llama_7b_step,
    llama_1b_generate, ddp_train, fsdp_train)}
