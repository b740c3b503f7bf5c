"""Four small trainings, each as it is or with one thing changed: a GPT, a convolutional net, an LSTM, a mixture of experts.

`change` names the difference; each place asks `self.change == "…"`, so that both sides run the same code otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, WORDS, LENGTH, BATCH = 48, 4, 61, 24, 6


class ScaledGradient(torch.autograd.Function):
    """Return the input; its gradient is multiplied by a factor, which is what a wrong backward kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.factor, None


class Kernel(nn.Module):
    """A fused kernel of one's own: the identity, whose backward may be wrong."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return ScaledGradient.apply(x, self.factor)  # pyright: ignore[reportReturnType]


class Attention(nn.Module):
    """Causal self-attention with separate q, k, v projections, all with a bias."""

    def __init__(self, change: str, eager: bool) -> None:
        super().__init__()
        self.change, self.eager = change, eager
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (each(x).view(b, t, HEADS, d // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v))
        scale = 1 / (d // HEADS) if self.change == "attention scale" else (d // HEADS) ** -0.5
        if self.change == "rope off by one":
            k = k.roll(1, 2)
        if self.eager:
            scores = q @ k.transpose(-1, -2) * scale
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
            mixed = scores.softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.change != "no mask", scale=scale)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """One layer of the GPT."""

    def __init__(self, change: str, eager: bool) -> None:
        super().__init__()
        self.change = change
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-3 if change == "norm eps" else 1e-5)
        self.attention = Attention(change, eager)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.kernel = Kernel(1.01 if change == "wrong backward" else 1.0)
        self.drop = nn.Dropout(0.0)
        if change == "gelu":
            self.act.approximate = "tanh"
        if change == "dropout":
            self.drop.p = 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kernel(self.attention(self.norm1(x)))
        h = self.norm2(x)
        if self.change == "detached":
            h = h.detach()
        return x + self.drop(self.down(self.act(self.up(h))))


class Gpt(nn.Module):
    """Three layers; the change is made in the second."""

    def __init__(self, change: str = "", eager: bool = False) -> None:
        super().__init__()
        self.change = change
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.layers = nn.ModuleList(Block(each, eager) for each in ("", change, ""))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if change == "one weight":
            with torch.no_grad():
                self.get_parameter("layers.1.attention.v.weight")[3, 4] += 0.01
        if change == "rounded weight":
            with torch.no_grad():
                weight = self.get_parameter("layers.1.up.weight")
                weight.copy_(weight.bfloat16())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]) + (self.change == "positions off by one")
        h = self.embed(x) + self.place(places)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h))
        smooth = 0.1 if self.change == "label smoothing" else 0.0
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=smooth)


class ConvBlock(nn.Module):
    """Convolution with a bias, batch norm, activation, and a residual."""

    def __init__(self, change: str, planes: int) -> None:
        super().__init__()
        self.change = change
        mode = "reflect" if change == "padding" else "zeros"
        self.conv = nn.Conv2d(planes, planes, 3, padding=1, padding_mode=mode)
        self.norm = nn.BatchNorm2d(planes, momentum=0.01 if change == "momentum" else 0.1)
        self.act = nn.SiLU() if change == "activation" else nn.ReLU()
        self.kernel = Kernel(0.99 if change == "wrong backward" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "norm in evaluation":
            self.norm.eval()
        h = self.act(self.norm(self.conv(self.kernel(x))))
        return (x + h) * (0.7 if self.change == "residual scale" else 1.0)


class ConvNet(nn.Module):
    """Stem, two blocks, pooling, classifier."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(ConvBlock("", 16), ConvBlock(change, 16))
        self.pool = nn.MaxPool2d(2) if change == "pooling" else nn.AvgPool2d(2)
        self.head = nn.Linear(16 * 6 * 6, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.pool(self.blocks(self.norm(self.stem(x)).relu()))
        return functional.cross_entropy(self.head(h.flatten(1)), y)


class Recurrent(nn.Module):
    """Embedding, two layers of torch's LSTM or one written out, and a head."""

    def __init__(self, change: str = "", written_out: bool = False) -> None:
        super().__init__()
        self.change, self.written_out = change, written_out
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        if change == "forget bias":
            with torch.no_grad():
                self.cell.bias_hh[WIDTH : 2 * WIDTH] += 1.0
        if change == "gate order":
            with torch.no_grad():
                weight = self.get_parameter("lstm.weight_hh_l0")
                i, f, g, o = weight.chunk(4)
                weight.copy_(torch.cat([i, g, f, o]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.lstm(self.embed(x))
        state = (h.new_zeros(len(x), WIDTH), h.new_zeros(len(x), WIDTH))
        if self.change == "initial state":
            state = (torch.full_like(state[0], 0.1), state[1])
        steps: list[Tensor] = []
        for t in range(h.shape[1]):
            if self.change == "state cut" and t == 12:
                state = (state[0].detach(), state[1].detach())
            if self.change == "one step skipped" and t == 5:
                steps.append(state[0])
                continue
            state = self.cell(h[:, t], state)
            steps.append(state[0])
        out = self.head(self.norm(torch.stack(steps, 1)))
        return functional.cross_entropy(out.flatten(0, 1), y.flatten())


class Experts(nn.Module):
    """Four experts of which a router chooses two."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        if change == "experts swapped":
            self.experts = nn.ModuleList([*self.experts[:2], self.experts[3], self.experts[2]])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        logits = self.router(flat)
        if self.change == "router in bfloat16":
            logits = logits.bfloat16().to(x.dtype)
        chances = logits.softmax(-1)
        weights, chosen = chances.topk(1 if self.change == "top 1" else 2, -1)
        if self.change != "not normalised":
            weights = weights / weights.sum(-1, keepdim=True)
        if self.change == "router detached":
            weights = weights.detach()
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if self.change == "capacity":
                token, slot = token[:40], slot[:40]
            out = out.index_add(0, token, (expert(flat[token]) * weights[token, slot, None]).to(out.dtype))
        share = functional.one_hot(chosen, 4).to(chances.dtype).mean((0, 1))
        balance = 4 * (share * chances.mean(0)).sum()
        return out.view_as(x), balance


class Mixture(nn.Module):
    """Two layers of experts; the change is made in the second."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.coefficient = 0.1 if change == "balance coefficient" else 0.01
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.layers = nn.ModuleList([Experts(""), Experts(change)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        balance = h.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, more = layer(norm(h))
            h, balance = h + out, balance + more
        loss = functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        return loss + self.coefficient * balance
