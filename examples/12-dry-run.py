"""A training script like any other, for `unhand dry-run`: a transformer of 300 million parameters, three steps.

Runs on any GPU with 24 GiB. The documents show what a dry run says about it, which needs no GPU.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()


class Model(nn.Module):
    """Predicts the next of 32,000 tokens from 512."""

    def __init__(self, width=1024, layers=18):
        super().__init__()
        self.words = nn.Embedding(32_000, width)
        layer = nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 32_000)

    def forward(self, tokens):
        return self.last(self.body(self.words(tokens)))


with torch.device("cuda"):
    model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(1, options.steps + 1):
    tokens = torch.zeros(options.batch_size, 512, dtype=torch.long, device="cuda")
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} of {options.steps}")
