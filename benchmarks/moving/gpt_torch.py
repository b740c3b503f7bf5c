"""The twin in PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainprobe
from benchmarks.moving.twins import Twin, batch, mask, plan, weights

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps, t: torch.optim.AdamW(ps, t.rate, eps=t.adam_epsilon, weight_decay=t.decay),
    "Adam": lambda ps, t: torch.optim.Adam(ps, t.rate, eps=t.adam_epsilon),
    "SGD": lambda ps, t: torch.optim.SGD(ps, t.rate, momentum=0.9, weight_decay=t.decay),
}


class RMSNorm(nn.Module):
    """A norm by the root mean square, of its own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + self.eps) * self.weight


def _norm(t: Twin) -> nn.Module:
    return nn.LayerNorm(t.width, eps=t.epsilon) if t.norm == "layer" else RMSNorm(t.width, t.epsilon)


class Attention(nn.Module):
    """Causal attention by hand."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(t.width, 3 * t.width, bias=t.bias), nn.Linear(t.width, t.width, bias=t.bias)
        self.heads = t.heads

    def forward(self, x: Any, added: Any) -> Any:
        size, length, width = x.shape
        q, k, v = (
            part.reshape(size, length, self.heads, width // self.heads).permute(0, 2, 1, 3) for part in self.qkv(x).chunk(3, -1)
        )
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) * (width // self.heads) ** -0.5
        shares = torch.softmax(scores + added, -1)
        return self.proj(torch.matmul(shares, v).permute(0, 2, 1, 3).reshape(size, length, width))


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(t.width, 4 * t.width, bias=t.bias), nn.Linear(4 * t.width, t.width, bias=t.bias)
        self.act = nn.GELU() if t.activation == "gelu" else nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """A block with norms before its parts."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = _norm(t), Attention(t), _norm(t), MLP(t)
        self.dropout = nn.Dropout(t.dropout)

    def forward(self, x: Any, added: Any) -> Any:
        x = x + self.dropout(self.attention(self.norm1(x), added))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """The model."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(t.words, t.width), nn.Embedding(t.length, t.width)
        self.blocks = nn.ModuleList(Block(t) for _ in range(t.layers))
        self.norm, self.head = _norm(t), nn.Linear(t.width, t.words, bias=False)

    def forward(self, tokens: Any, added: Any) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, added)
        return self.head(self.norm(x))


def train(t: Twin, output: Path, more: Mapping[str, Any] | None = None) -> None:
    """Train a twin under the plan of the bench. more: other fields of the plan."""
    torch.manual_seed(t.seed)
    model = GPT(t)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights(t).items()})
    optimizer, added = OPTIMIZERS[t.optimizer](model.parameters(), t), torch.from_numpy(mask(t))
    with trainprobe.watch(model, optimizer, {**plan(str(output)), **(more or {})}) as probe:
        for step in range(t.steps):
            with probe.step():
                for group in optimizer.param_groups:
                    group["lr"] = t.rate_of(step)
                optimizer.zero_grad()
                for micro in range(t.micro):
                    tokens = torch.from_numpy(batch(t, step, micro)).long()
                    logits = model(tokens[:, :-1], added)
                    loss = functional.cross_entropy(logits.reshape(-1, t.words), tokens[:, 1:].reshape(-1))
                    (loss * (t.scale / t.micro)).backward()
                for p in model.parameters():
                    if p.grad is not None and t.scale != 1 and not t.left_scaled:
                        p.grad /= t.scale
                if t.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), t.clip)
                for p in model.parameters():
                    if p.grad is not None and t.grow != 1:
                        p.grad *= t.grow
                optimizer.step()
                probe.note("loss", loss.detach())


if __name__ == "__main__":
    for folder, given in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        train(Twin.of(given), Path(folder), given.get("plan"))
