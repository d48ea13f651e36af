"""Out of memory in the middle of a loop: pieces that shrink while somebody else has the memory, and grow back.

Runs on any GPU with 2 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import itertools

import torch
from torch import nn

import unhand

MIB = 1 << 20

# As on a small card: PyTorch may have 1 GiB.
total = torch.cuda.mem_get_info()[1]
torch.cuda.set_per_process_memory_fraction(1024 * MIB / total)


def embed(part):
    """Needs 2 MiB of activations for each row."""
    hidden = torch.zeros(len(part), MIB // 4, device="cuda")
    return (hidden + 1).sum(dim=1).cpu()


print("== batches")
rows = torch.arange(12_000.0)
pieces = unhand.batches(rows, 1024, device="cuda")
neighbour = None
done = 0
for result in pieces.map(embed):
    done += len(result)
    if neighbour is None and 1000 < done < 2000:
        # Another model comes to the same GPU, and goes again.
        neighbour = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
    elif done > 3000:
        neighbour = False
print(f"{done} rows, out of memory {pieces.n_failures} times; rows at a time:")
print(", ".join(f"{len(list(same))} x {n}" for n, same in itertools.groupby(pieces.sizes)))

print("\n== adaptive")


@unhand.adaptive(start=4096)
def train(model, batch_size):
    print(f"trying {batch_size}")
    return model(torch.zeros(batch_size, MIB // 4, device="cuda")).shape


model = nn.Linear(MIB // 4, 8).cuda()
train(model)
print("once more")
train(model)

print("\n== accumulate")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
x, y = torch.randn(100, 8), torch.randn(100, 1)


def step(part):
    if len(part["x"]) > 30:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory (played: this runs on the host)")
    return nn.functional.mse_loss(model(part["x"]), part["y"])


loss = unhand.accumulate(step, {"x": x, "y": y}, 100, model)
found = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
whole = nn.functional.mse_loss(model(x), y)
whole.backward()
equal = all(torch.allclose(grad, parameter.grad, atol=1e-6) for grad, parameter in zip(found, model.parameters()))
print(f"loss {loss:.4f}, of the whole batch {whole:.4f}; same gradients: {equal}")

print("\n== prefetch")
loader = [{"x": torch.full((256, 1024), float(index)), "name": f"batch {index}"} for index in range(4)]
for batch in unhand.prefetch(loader, depth=2):
    print(batch["name"], batch["x"].device, batch["x"][0, 0].item())
