"""Operators, layers, optimizers and libraries: everything runs, with the shapes it should have."""

import torch
from bench import main
from torch import nn
from torch.nn import functional

DEVICE = "cuda"


def check_linear_in_all_precisions():
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        layer = nn.Linear(64, 32).to(DEVICE, kind)
        layer(torch.randn(8, 64, device=DEVICE, dtype=kind)).sum().backward()
        assert layer.weight.grad.shape == (32, 64) and layer.weight.grad.dtype == kind


def check_optimizers():
    for options in ({}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}):
        model = nn.Linear(64, 64).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(2):
            model(torch.randn(4, 64, device=DEVICE)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    model = nn.Linear(64, 64).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 64, device=DEVICE)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def check_autocast():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1)).to(DEVICE)
    for kind in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=kind):
            output = model(torch.randn(8, 64, device=DEVICE))
        output.float().mean().backward()


def check_embeddings_and_losses():
    table = nn.Embedding(1000, 32).to(DEVICE)
    output = table(torch.randint(0, 1000, (4, 16), device=DEVICE))
    loss = functional.cross_entropy(output.flatten(0, 1) @ table.weight.t(), torch.randint(0, 1000, (64,), device=DEVICE))
    loss.backward()
    assert functional.softmax(output, -1).shape == (4, 16, 32)


def check_attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        query, key, value = (torch.randn(2, 4, 128, 64, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in "qkv")
        with sdpa_kernel(backend):
            output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.sum().backward()
        assert output.shape == (2, 4, 128, 64) and key.grad.shape == key.shape, backend


def check_convolutions():
    for enabled, benchmark in ((True, False), (True, True), (False, False)):
        with torch.backends.cudnn.flags(enabled=enabled, benchmark=benchmark):
            for layer, size in (
                (nn.Conv1d(4, 8, 3), (2, 4, 32)),
                (nn.Conv2d(4, 8, 3, padding=1, groups=2), (2, 4, 32, 32)),
                (nn.Conv3d(4, 8, 3), (2, 4, 8, 8, 8)),
                (nn.ConvTranspose2d(4, 8, 3, stride=2), (2, 4, 16, 16)),
            ):
                batch = torch.randn(size, device=DEVICE, requires_grad=True)
                layer.to(DEVICE)(batch).sum().backward()
                assert batch.grad.shape == size


def check_normalisation_and_pooling():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)).to(DEVICE)
    for layout in (torch.contiguous_format, torch.channels_last):
        batch = torch.randn(4, 3, 32, 32, device=DEVICE).to(memory_format=layout)
        model.to(memory_format=layout)(batch).sum().backward()
    model.eval()
    assert model(batch).shape == (4, 8, 1, 1)


def check_recurrent_networks():
    for kind, options in (
        (nn.LSTM, {}), (nn.LSTM, {"bidirectional": True}), (nn.LSTM, {"proj_size": 16}), (nn.LSTM, {"bias": False}),
        (nn.GRU, {"bidirectional": True}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"}),
    ):
        model = kind(24, 32, num_layers=2, batch_first=True, dropout=0.1, **options).to(DEVICE)
        output, _ = model(torch.randn(4, 10, 24, device=DEVICE))
        width = options.get("proj_size", 32) * (2 if options.get("bidirectional") else 1)
        assert output.shape == (4, 10, width), (kind, options)
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def check_weights_of_recurrent_networks_survive_packing():
    model = nn.LSTM(24, 32, num_layers=2, bidirectional=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    there = model.to(DEVICE)
    there.flatten_parameters()
    for name, value in there.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


def check_linear_algebra():
    matrix = torch.randn(16, 16, device=DEVICE)
    for call in (torch.linalg.inv, torch.linalg.qr, torch.linalg.det, torch.linalg.lu_factor):
        call(matrix)
    torch.linalg.cholesky(matrix @ matrix.t() + torch.eye(16, device=DEVICE))
    assert torch.linalg.solve(matrix, torch.randn(16, 3, device=DEVICE)).shape == (16, 3)
    assert torch.linalg.svd(matrix)[1].shape == (16,)
    assert torch.linalg.svdvals(matrix).shape == (16,)
    assert torch.linalg.eigh(matrix + matrix.t())[0].shape == (16,)
    assert torch.linalg.lstsq(torch.randn(16, 4, device=DEVICE), torch.randn(16, 2, device=DEVICE)).solution.shape == (4, 2)


def check_fourier_transforms():
    assert torch.fft.fft(torch.randn(4, 64, device=DEVICE)).shape == (4, 64)
    assert torch.fft.rfft2(torch.randn(4, 64, 64, device=DEVICE)).shape == (4, 64, 33)
    assert torch.stft(torch.randn(4000, device=DEVICE), 256, window=torch.hann_window(256, device=DEVICE), return_complex=True).shape[0] == 129


def check_sparse():
    rows = torch.tensor([0, 2, 3, 5])
    matrix = torch.sparse_csr_tensor(rows, torch.tensor([0, 1, 2, 0, 1]), torch.randn(5), size=(3, 3)).to(DEVICE)
    assert (matrix @ torch.randn(3, 4, device=DEVICE)).shape == (3, 4)


def check_sorting_and_scanning():
    numbers = torch.randn(100, 50, device=DEVICE)
    assert numbers.sort(-1).values.shape == (100, 50)
    assert numbers.topk(5).values.shape == (100, 5)
    assert numbers.cumsum(0).shape == (100, 50)
    assert torch.multinomial(torch.ones(10, device=DEVICE), 3).shape == (3,)


def check_printing():
    assert "device='cuda:0'" in repr(torch.randn(4, 4, device=DEVICE))
    assert "device='cuda:0'" in repr(torch.zeros(2000, 10, device=DEVICE))


def check_checkpointing():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(64, 64).to(DEVICE)
    batch = torch.randn(8, 64, device=DEVICE, requires_grad=True)
    checkpoint(layer, batch, use_reentrant=False).sum().backward()
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)


def check_transformers():
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True).to(DEVICE)
    assert model(torch.randn(2, 10, 64, device=DEVICE), torch.randn(2, 7, 64, device=DEVICE)).shape == (2, 7, 64)
    model.eval()
    with torch.no_grad():
        model.encoder(torch.randn(2, 10, 64, device=DEVICE), src_key_padding_mask=torch.zeros(2, 10, dtype=torch.bool, device=DEVICE))


def check_one_process_can_be_a_group():
    import os
    import tempfile

    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    path = os.path.join(tempfile.mkdtemp(), "store")
    distributed.init_process_group("nccl", init_method=f"file://{path}", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        numbers = torch.arange(5.0).to(DEVICE)
        distributed.all_reduce(numbers)
        gathered = [torch.zeros(5, device=DEVICE)]
        distributed.all_gather(gathered, numbers)
        assert gathered[0].cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        model = DistributedDataParallel(nn.Linear(64, 64).to(DEVICE), device_ids=[0])
        model(torch.randn(4, 64, device=DEVICE)).sum().backward()
        assert model.module.weight.grad is not None
    finally:
        distributed.destroy_process_group()


def check_the_profiler():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.randn(64, 64, device=DEVICE) @ torch.randn(64, 64, device=DEVICE)
    assert any("aten::" in event.key for event in profiler.key_averages())


if __name__ == "__main__":
    main(globals())
