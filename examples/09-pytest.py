"""Tests that limit GPU memory and find what stays behind: `pytest examples/09-pytest.py`. Two of them are meant to fail."""

import pytest
import torch
from torch import nn

history = []


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()


def step(model, rows):
    batch = torch.randn(rows, 1024, device="cuda")
    loss = model(batch).square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss


@pytest.mark.limit_gpu("128 MiB")
def test_a_small_batch_fits(model):
    step(model, rows=256)


@pytest.mark.limit_gpu("128 MiB")
def test_a_large_batch_fits(model):
    step(model, rows=8192)


@pytest.mark.no_gpu_leak
def test_steps_leave_nothing_behind(model):
    for _ in range(3):
        step(model, rows=256)


@pytest.mark.no_gpu_leak
def test_evaluation_leaves_nothing_behind(model):
    for _ in range(3):
        history.append(model(torch.randn(256, 1024, device="cuda")).mean())
