"""Train a model of the zoo and take down every bit that training could have changed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo import Case

Bits = dict[str, bytes]
Watch = Callable[[nn.Module, torch.optim.Optimizer], Any]


def train(case: Case, steps: int = 3, watch: Watch | None = None) -> Bits:
    """Train from fixed seeds, under `watch` if it is given; return losses, gradients, weights and all other state."""
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bits: Bits = {}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(watch(model, optimizer)) if watch else None
        for step in range(steps):
            with probe.step() if probe else contextlib.nullcontext():
                losses = one_step(case, model, optimizer, step)
            bits |= {f"step {step}: loss {i}": bits_of(loss) for i, loss in enumerate(losses)}
            bits |= {f"step {step}: gradient of {n}": bits_of(p.grad) for n, p in model.named_parameters()}
    return bits | state(model, optimizer)


def one_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Tensor]:
    """Run one optimizer step over the case's micro-batches; return their losses. Gradients stay in the parameters."""
    optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for micro in range(case.micro):
        loss = case.loss(model, case.batch(step * case.micro + micro))
        (loss / case.micro).backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


def seed_all() -> None:
    """Put every random generator into a known state."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Return the bits of weights, buffers, optimizer state and random generators."""
    bits = {f"weights or buffer {name}": bits_of(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items():
        bits |= {f"optimizer {key} of {names[parameter]}": bits_of(torch.as_tensor(value)) for key, value in entries.items()}
    bits["torch random state"] = bits_of(torch.get_rng_state())
    bits["python random state"] = repr(random.getstate()).encode()
    bits["numpy random state"] = repr(np.random.get_state()).encode()
    return bits


def bits_of(t: Tensor | None) -> bytes:
    """Return dtype, shape and raw bytes of a tensor; of no tensor, a word."""
    if t is None:
        return b"none"
    t = t.detach().cpu().contiguous()
    raw = t.reshape(-1).view(torch.uint8) if t.numel() else torch.zeros(0, dtype=torch.uint8)
    return f"{t.dtype} {tuple(t.shape)} ".encode() + raw.numpy().tobytes()


def differences(a: Bits, b: Bits) -> list[str]:
    """Return what differs between two states, in the order in which it was taken down."""
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
