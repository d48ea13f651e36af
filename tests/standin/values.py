"""Values that programs branch on: computed where the kernel is known and the tensor small, defined elsewhere."""

import torch
from bench import main, raises

DEVICE = "cuda"


def equal(found, expected):
    found = found.cpu() if isinstance(found, torch.Tensor) else found
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected, (found, expected)


def check_fills():
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
        equal(torch.ones(1000, dtype=kind, device=DEVICE), torch.ones(1000, dtype=kind))
        equal(torch.full((3, 5), 1, dtype=kind, device=DEVICE), torch.full((3, 5), 1, dtype=kind))
        equal(torch.zeros(7, dtype=kind, device=DEVICE), torch.zeros(7, dtype=kind))
    assert torch.full((), 65536.0, device=DEVICE).item() == 65536.0


def check_ranges():
    equal(torch.arange(10, device=DEVICE), torch.arange(10))
    equal(torch.arange(3, 30, 4, device=DEVICE), torch.arange(3, 30, 4))
    equal(torch.arange(0.0, 3.0, 0.5, device=DEVICE), torch.arange(0.0, 3.0, 0.5))


def check_copies_through_kernels():
    source = torch.randn(8, 12, 5)
    there = source.to(DEVICE)
    equal(there.transpose(0, 1).contiguous(), source.transpose(0, 1).contiguous())
    equal(there[1:, 2::3].contiguous(), source[1:, 2::3].contiguous())
    equal(there[1:, 2:], source[1:, 2:])
    target = torch.zeros(8, 12, 5, device=DEVICE)
    target[:, ::2] = there[:, ::2]
    expected = torch.zeros(8, 12, 5)
    expected[:, ::2] = source[:, ::2]
    equal(target, expected)


def check_casts():
    source = torch.tensor([0.0, -1.5, 3.25, 70000.0, 1e-7, float("inf"), 2049.0])
    there = source.to(DEVICE)
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        equal(there.to(kind), source.to(kind))
        equal(there.to(kind).float(), source.to(kind).float())
    small = torch.tensor([0.0, -1.5, 3.75])
    equal(small.to(DEVICE).long(), small.long())
    equal(torch.tensor([0, 3, -1]).to(DEVICE).to(torch.float32), torch.tensor([0.0, 3.0, -1.0]))
    equal(torch.tensor([0, 3, 0]).to(DEVICE).bool(), torch.tensor([False, True, False]))


def check_comparisons():
    source = torch.tensor([1.0, float("nan"), -2.0, 3.0])
    there = source.to(DEVICE)
    for compare in (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne):
        equal(compare(there, 1.0), compare(source, 1.0))
        equal(compare(there, there), compare(source, source))
    equal(torch.isnan(there), torch.isnan(source))
    labels = torch.tensor([5, -100, 7])
    equal(labels.to(DEVICE) != -100, labels != -100)


def check_reductions_to_one_number():
    flags = torch.zeros(5000, dtype=torch.bool)
    for index in (None, 4999):
        if index is not None:
            flags[index] = True
        there = flags.to(DEVICE)
        assert there.any().item() == (index is not None) and not there.all().item()
        assert int(there.sum()) == (0 if index is None else 1)
    numbers = torch.arange(100.0)
    there = numbers.to(DEVICE)
    assert (there.sum().item(), there.mean().item(), there.max().item(), there.min().item()) == (4950.0, 49.5, 99.0, 0.0)
    assert torch.isnan(torch.tensor([1.0, float("nan")]).to(DEVICE)).any().item()
    assert torch.equal(there, there.clone()) and not torch.equal(there, torch.zeros(100, device=DEVICE))


def check_sizes_that_depend_on_values():
    mask = torch.rand(37, 41) > 0.5
    there = mask.to(DEVICE)
    equal(there.nonzero(), mask.nonzero())
    assert torch.zeros(37, 41, device=DEVICE)[there].shape == (int(mask.sum()),)
    many = torch.rand(300_000) > 0.9
    assert many.to(DEVICE).nonzero().shape == many.nonzero().shape
    assert torch.ones(5, device=DEVICE).nonzero().shape == (5, 1)
    # What nobody computed is counted all the same, within the number of elements.
    assert (torch.randn(1000, device=DEVICE) @ torch.randn(1000, 1000, device=DEVICE) > 0).nonzero().shape[0] <= 1000
    assert torch.unique(torch.tensor([3, 1, 3]).to(DEVICE)).numel() <= 3


def check_losses_are_numbers():
    logits = torch.randn(16, 100, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 100, (16,), device=DEVICE)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert loss.item() == 0.0
    assert not torch.isnan(loss).any()
    assert torch.isfinite(logits.pow(2).mean()).item() in (True, False)


def check_positions_are_indices():
    assert torch.randn(7, 100, device=DEVICE).argmax(-1).cpu().tolist() == [0] * 7


def check_a_gradient_scaler_keeps_its_scale():
    model = torch.nn.Linear(64, 64).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(8, 64, device=DEVICE)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536.0


def check_counters_count():
    counters = [torch.zeros((), device=DEVICE) for _ in range(200)]
    torch._foreach_add_(counters, 1)
    torch._foreach_add_(counters, 1)
    assert {counter.item() for counter in counters} == {2.0}
    counter = torch.zeros((), device=DEVICE)
    counter += 1
    assert counter.item() == 1.0 and (torch.arange(3, device=DEVICE) - 2).cpu().tolist() == [-2, -1, 0]
    torch.set_default_device(DEVICE)
    try:
        # Then the optimizer's counters are on the device, and it reads them.
        model = torch.nn.Linear(8, 8)
        for options in ({}, {"foreach": False}):
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            for _ in range(3):
                model(torch.zeros(2, 8)).sum().backward()
                optimizer.step()
    finally:
        torch.set_default_device("cpu")


def check_large_fills_are_left_out():
    # What the page says about limits: no host memory is spent on values nobody looks at.
    big = torch.full((1 << 24,), 3.0, device=DEVICE)
    assert big[:10].cpu().shape == (10,)
    raises(RuntimeError, lambda: torch.ones(2, device=DEVICE) + torch.ones(3, device=DEVICE), "size")


if __name__ == "__main__":
    main(globals())
