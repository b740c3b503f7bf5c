"""The demo's training: a small GPT on Python's own source, monitored at every step and dumped in full at two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainprobe import watch
from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import GPT, Shape, next_token_loss
from trainprobe.engine.core.records import Finding

BATCH = 4
PEAK_RATE = 1e-3
WARMUP = 20
FEATURES = {
    "attention": True,
    "dead_units": True,
    "weights": {"every": 5},
    "formats": {"every": 10, "slots": ("output", "value", "grad")},
}
SAVED = "layers.0.**"  # of the dumped steps, the values of this layer are stored too


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the training leaves: the findings, the size of the model, and how many tokens it saw."""

    findings: tuple[Finding, ...]
    parameters: int
    tokens: int


def learning_rate(step: int, steps: int) -> float:
    """Return a linear warm-up to the peak, then half a cosine down to a tenth of it."""
    done = max(0.0, (step - WARMUP) / max(1, steps - WARMUP))
    return PEAK_RATE * min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * done))


def update(model: GPT, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Update the model once, with clipped gradients; return the loss, a tensor of one element."""
    loss = next_token_loss(model(inputs), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def train(folder: Path, steps: int, dumped: tuple[int, ...], tell: Callable[[int], None]) -> Outcome:
    """Train `steps` steps and write everything to `folder`; `tell(step)` is called after each."""
    torch.manual_seed(0)
    shape = Shape()
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.1)
    corpus = read_corpus()
    plan = {
        "output": folder,
        "monitor": {"activation_gradients": True, "batches": True, "features": FEATURES},  # at every step, with all rules
        "step": dumped,  # and these in full
        "level": "mix",
        "summary": "both",
        "tensors": SAVED,
        "sinks": ("dump", "parquet"),
    }
    with watch(model, optimizer, plan) as probe:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            inputs, targets = map(torch.from_numpy, draw_batch(corpus, step, BATCH, shape.context))
            with probe.step(step):
                probe.note("loss", update(model, optimizer, inputs, targets))
            tell(step)
    return Outcome(tuple(probe.findings), sum(p.numel() for p in model.parameters()), steps * BATCH * shape.context)
