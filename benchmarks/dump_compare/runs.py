"""Train a subject for two steps and dump them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import trainprobe
from benchmarks.dump_compare.kernels import Replaced
from benchmarks.dump_compare.subjects import BATCH, LENGTH, WORDS, ConvNet, Gpt, Mixture, Recurrent

STEPS = 2
SUBJECTS: dict[str, Callable[..., nn.Module]] = {"gpt": Gpt, "conv": ConvNet, "lstm": Recurrent, "moe": Mixture}


@dataclass(frozen=True)
class Way:
    """How a training is run: what must not matter, and at most one change that does.

    threads: of torch. model: keywords of the subject's class. optimizer: keywords of the optimizer. micros: micro-batches, of
    the same samples together. apart: linear layers multiply and add in two operators. math: attention is computed by operators
    within its kernel. kernels: what takes the place of torch's. weights: changes the weights.
    """

    threads: int = 1
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    algorithm: str = "AdamW"
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    channels_last: bool = False
    compiled: bool = False
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    change: str = ""
    noise: float = 0.0
    micros: int = 2
    apart: bool = False
    math: bool = False
    kernels: Replaced | None = None
    weights: Callable[[nn.Module], Any] | None = None


def batch_of(subject: str, generator: torch.Generator, change: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one micro-batch."""
    if subject == "conv":
        x, y = torch.randn(8, 3, 12, 12, generator=generator), torch.randint(10, (8,), generator=generator)
        return (x.flip(1) if change == "channels reversed" else x), y
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    if change == "one token":
        words[2, 7] = (words[2, 7] + 1) % WORDS
    return words[:, :-1], words[:, :-1] if change == "labels not shifted" else words[:, 1:]


def train(output: Path, subject: str, way: Way, **plan: Any) -> Path:
    """Train with the probe and return the folder of the dump."""
    before = torch.get_num_threads()
    torch.set_num_threads(way.threads)
    try:
        return _train(output, subject, way, plan)
    finally:
        torch.set_num_threads(before)


def _train(output: Path, subject: str, way: Way, plan: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    change = way.change
    model = SUBJECTS[subject](change=change, **way.model).to(way.dtype)
    if way.noise:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + way.noise * torch.randn_like(parameter))
    if way.weights is not None:
        with torch.no_grad():
            way.weights(model)
    if way.apart:
        _take_apart(model)
    if way.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    settings: dict[str, Any] = {"lr": 1e-2 if way.algorithm == "SGD" else 1e-3, **_settings(change), **way.optimizer}
    optimizer = getattr(torch.optim, way.algorithm)(model.parameters(), **settings)
    torch.manual_seed(1)
    run = torch.compile(model) if way.compiled else model
    generator = torch.Generator().manual_seed(3)
    with ExitStack() as stack:
        if way.kernels is not None:
            stack.enter_context(way.kernels)
        if way.math:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        probe = stack.enter_context(trainprobe.watch(model, optimizer, output=output, console=False, **plan))
        for step in range(STEPS):
            batches = [batch_of(subject, generator, change) for _ in range(2)]
            if way.micros != 2:
                whole = (torch.cat(each).chunk(way.micros) for each in zip(*batches, strict=True))
                batches = list(zip(*whole, strict=True))
            with probe.step():
                _step(run, model, optimizer, batches, way, step)
    return output


def _take_apart(model: nn.Module) -> None:
    """Let linear layers multiply and add in two operators."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.forward = lambda x, layer=layer: x @ layer.weight.t() + layer.bias


def _settings(change: str) -> dict[str, Any]:
    return {
        "learning rate": {"lr": 1.1e-3},
        "weight decay": {"weight_decay": 0.1},
        "beta2": {"betas": (0.9, 0.95)},
        "adam eps": {"eps": 1e-6},
        "nesterov": {"nesterov": True},
    }.get(change, {})


def _step(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, way: Way, step: int) -> None:
    if way.change != "gradients kept" or step == 0:
        optimizer.zero_grad()
    for x, y in batches:
        if x.is_floating_point():
            x = x.to(way.dtype)
            x = x.to(memory_format=torch.channels_last) if way.channels_last else x
        with torch.autocast("cpu", way.autocast or torch.bfloat16, enabled=way.autocast is not None):
            loss = run(x, y)
        (loss / (1 if way.change == "accumulation not divided" else len(batches))).backward()
    if way.change != "not clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
