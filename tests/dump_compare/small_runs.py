"""Two steps of a small GPT, as it is or with one thing changed; each is dumped by the probe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe

WIDTH, HEADS, WORDS = 32, 4, 20


class Block(nn.Module):
    """`attention`, `scale`, `extra` and `gelu` are the changes; the last three are made in the second block."""

    def __init__(self, change: str, dropout: float) -> None:
        super().__init__()
        self.change = change
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        if change == "gelu":
            self.act.approximate = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        if self.change == "attention":
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
            mixed = (q @ k.transpose(-1, -2) * (d // HEADS) ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.change == "scale":
            mixed = mixed * 1.001
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        if self.change == "extra":
            x = x + 0.0
        return x + self.down(self.act(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, change: str, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        changes = [change if change == "attention" else "", change, ""]
        self.layers = nn.ModuleList(Block(each, dropout) for each in changes)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def run(
    output: Path, change: str = "", *, dropout: float = 0.0, meddle: Callable[[Gpt], Any] | None = None, **plan: Any
) -> Path:
    """Train and return the dump's folder. change: also "data", another batch; "seed", other random numbers; "bfloat16"."""
    torch.manual_seed(0)
    model = Gpt(change, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if meddle is not None:
        with torch.no_grad():
            meddle(model)
    torch.manual_seed(2 if change == "seed" else 1)
    generator = torch.Generator().manual_seed(4 if change == "data" else 3)
    with trainprobe.watch(model, optimizer, output=output, **plan) as probe:
        for _ in range(2):
            words = torch.randint(WORDS, (4, 9), generator=generator)
            with probe.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=change == "bfloat16"):
                    loss = model(words[:, :-1], words[:, 1:])
                loss.backward()
                optimizer.step()
    return output
