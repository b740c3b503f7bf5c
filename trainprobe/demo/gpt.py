"""A small GPT in plain PyTorch: the model of the demo, the benchmarks and many tests.

Pre-norm decoder blocks (Radford et al., 2019) with causal self-attention, a GELU feed-forward of four times the width,
learned or rotary positions (Su et al., 2021), an optional dropout and an optionally tied output head. Attention is one fused
call, or written out as products and a softmax, so that what is inside it can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and options of a GPT; `heads` must divide `width`, and with rotary positions width / heads must be even."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.0
    positions: Literal["learned", "rotary"] = "learned"
    tied_head: bool = False
    attention: Literal["fused", "explicit"] = "fused"


class Attention(nn.Module):
    """Causal multi-head self-attention, float [batch, length, width] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.rotary = shape.positions == "rotary"
        self.drop = shape.dropout
        self.fused = shape.attention == "fused"
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        attend = functional.scaled_dot_product_attention if self.fused else explicit_attention
        y = attend(q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, float [batch, length, width] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """One pre-norm decoder layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token indices int64 [batch, length] to logits float [batch, length, vocabulary]."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width) if shape.positions == "learned" else None
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.down.weight")):  # residual branches, as in GPT-2
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)
        if shape.tied_head:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar, of logits [batch, length, vocabulary] against int64 [batch, length]."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout_p: float) -> Tensor:
    """Return softmax(q kᵀ / √size) v, masked to the past if `is_causal`; all float [batch, heads, length, size]."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return functional.dropout(scores.softmax(dim=-1), dropout_p) @ v


def rotate(x: Tensor) -> Tensor:
    """Turn pairs (i, i + size/2) of float [batch, heads, length, size] by position · 10000^(-2i/size)."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _initialise(module: nn.Module) -> None:
    """Draw weights from N(0, 0.02²) and clear biases, as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    bias = module.bias if isinstance(module, nn.Linear) else None
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)
