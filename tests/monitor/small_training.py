"""A small real GPT training, and a plain collection of its numbers with torch hooks, for the rules to judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from trainprobe.engine.core.records import Place, Record, Site, Step
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_records


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, norms: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = (nn.LayerNorm(width) if norms else nn.Identity() for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.fc2(self.act(self.fc1(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, vocab=64, width=32, layers=4, heads=4, context=32, dropout=0.1, norms=True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads, dropout, norms) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


def batch(generator: torch.Generator, vocab=64, context=32, size=8) -> torch.Tensor:
    """Tokens [size, context + 1] of noisy counting: something a small model can learn."""
    start = torch.randint(0, vocab, (size, 1), generator=generator)
    stride = torch.randint(1, 4, (size, 1), generator=generator)
    noise = (torch.rand(size, context + 1, generator=generator) < 0.1) * torch.randint(
        0, vocab, (size, context + 1), generator=generator
    )
    return (start + stride * torch.arange(context + 1) + noise) % vocab


def numbers(tensor: torch.Tensor) -> dict[str, float]:
    x = tensor.detach().double().numpy().reshape(-1)  # tensors are small, and a call of NumPy takes less time than one of torch
    if not x.size:
        return {}
    high, low = float(x.max()), float(x.min())
    return {
        "norm": math.sqrt(x.dot(x)),
        "absmax": max(high, -low),
        "max": high,
        "min": low,
        "mean": float(x.mean()),
        "zero": float(x.size - np.count_nonzero(x)),
        "count": float(x.size),
        "nan": float(np.isnan(x).sum()),
    }


class Collector:
    """Collects records of one step with forward hooks and tensor hooks; test code, not the product."""

    def __init__(self, model: nn.Module) -> None:
        self.records: list[Record] = []
        self.step = 0
        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, i, o, n=name: self.called(m, n, i, o))
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=name: self.add("backward", "parameter", n, "grad", p.grad))

    def called(self, module, name, inputs, output) -> None:
        for i, x in enumerate(inputs):
            if x.is_floating_point():
                self.add("forward", "module", name, f"input.{i}", x)
        for short, p in module.named_parameters(recurse=False):
            self.add("forward", "module", name, f"parameters.{short}", p)
        self.add("forward", "module", name, "output", output)

    def add(self, phase, kind, name, slot, tensor) -> None:
        site = Site(kind, name, slot)
        self.records.append(
            Record(Step(self.step, None, phase), Place(), site, str(tensor.dtype), tuple(tensor.shape), numbers(tensor))
        )


def train(
    seed: int = 0,
    steps: int = 300,
    rate: float = 1e-3,
    tamper: Callable[[int, GPT, torch.optim.Optimizer], None] | None = None,
    tamper_gradients: Callable[[int, GPT], None] | None = None,
    tamper_loss: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    scalars: Callable[[int], dict[str, float]] | None = None,
    table: SeriesTable | None = None,
    **shape,
) -> Iterator[Frame]:
    """Train with warm-up, cosine decay, dropout and clipping; yield a frame a step. The tamper functions plant faults."""
    torch.manual_seed(seed)
    model = GPT(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    collector, table = Collector(model), table or SeriesTable()
    for step in range(steps):
        collector.step, collector.records = step, []
        lr = rate * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps) * 0.9)
        optimizer.param_groups[0]["lr"] = lr
        if tamper:
            tamper(step, model, optimizer)
        tokens = batch(generator)
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (tamper_loss(step, loss) if tamper_loss else loss).backward()
        if tamper_gradients:
            tamper_gradients(step, model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            collector.add("optimizer", "parameter", name, "update", p.detach() - before[name])
        told = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr} | (scalars(step) if scalars else {})
        for name, value in told.items():
            site = Site("scalar", name, "value")
            collector.records.append(Record(Step(step, None, "step"), Place(), site, "float64", (), {"value": value}))
        yield frame_of_records(step, Place(), collector.records, table)
