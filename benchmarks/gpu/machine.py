"""The machine that is measured, and the trainings that are run on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainprobe.demo.gpt import GPT, Shape, next_token_loss

Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, whether sizes are those of a rehearsal, and where files go."""

    device: str
    """`cuda`, `npu` or `cpu`."""
    rehearse: bool
    """Small sizes, few steps."""
    output: Path
    """An existing folder."""

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()


def copy_bandwidth(machine: Machine) -> float:
    """Return the bytes a second that a copy on the device reads and writes: the best of three, of 256 MB."""
    source = torch.zeros(1 << (20 if machine.rehearse else 27), dtype=torch.int16, device=machine.device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(4):
        machine.wait()
        begun = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        machine.wait()
        best = min(best, time.perf_counter() - begun)
    return 10 * 2 * source.nbytes / best


SHAPES = {
    "124M": (Shape(layers=12, width=768, heads=12, context=1024, vocabulary=50_304, tied_head=True), 8),
    "launch-bound": (Shape(layers=4, width=64, heads=4, context=32, attention="explicit"), 2),
    "small": (Shape(layers=6, width=384, heads=6, context=256), 4),
    "rehearsal": (Shape(layers=2, width=16, heads=2, context=8, vocabulary=32), 2),
}


@dataclass(slots=True)
class Training:
    """A seeded training; two of the same arguments give the same bits where the device repeats itself.

    `step(i)` runs forward, backward and update on batch i and returns the loss, a scalar tensor on the device.
    """

    model: GPT
    """The model, on the device."""
    optimizer: torch.optim.AdamW
    """Its optimizer."""
    scaler: Any
    """The GradScaler, which does nothing but for fp16."""
    step: Callable[[int], Tensor]
    """One training step."""


def prepare(machine: Machine, size: str, precision: Precision, *, compiled: bool = False, captured: bool = False) -> Training:
    """Build a training. compiled: the forward, by torch.compile. captured: the update is one CUDA graph that is replayed."""
    shape, batch = SHAPES["rehearsal" if machine.rehearse else size]
    torch.manual_seed(0)
    model = GPT(shape).to(machine.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=captured and machine.device == "cuda")
    scaler: Any = torch.amp.GradScaler(machine.device, enabled=precision == "fp16", init_scale=2.0**12)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocabulary, (8, batch, shape.context + 1), generator=generator).to(machine.device)
    forward: Any = torch.compile(model) if compiled else model
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    update = Update(optimizer, scaler) if captured and machine.device == "cuda" else None

    def step(i: int) -> Tensor:
        inputs, targets = tokens[i % 8, :, :-1], tokens[i % 8, :, 1:]
        optimizer.zero_grad(set_to_none=update is None)
        with torch.autocast(machine.device, dtype) if dtype is not None else contextlib.nullcontext():
            loss = next_token_loss(forward(inputs), targets)
        scaler.scale(loss).backward()
        if update is not None:
            update(i)
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return Training(model, optimizer, scaler, step)


class Update:
    """An optimizer's step that is captured at its fourth call and replayed from then on (torch's notes on CUDA graphs)."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if scaler.is_enabled():
            raise ValueError("GradScaler reads a number of the device at each step, which a CUDA graph cannot hold")
        self._optimizer = optimizer
        self._graph: Any = None

    def __call__(self, i: int) -> None:
        if i < 3:
            self._optimizer.step()
        elif self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._optimizer.step()
            self._graph.replay()  # capturing runs nothing
        else:
            self._graph.replay()
