"""Every bit of the training is the same with and without the tool, in each precision, compiled, and with a captured update."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainprobe
from benchmarks.gpu.machine import Machine, Precision, prepare
from trainprobe.self_test.training import bits_of, plans, state_bits

STEPS = 5
_PRECISIONS: tuple[Precision, ...] = ("bf16", "float32", "fp16")
_COMPILED = ("L0 statistics", "monitor", "audit")  # each compiles anew, which takes most of the time


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a line a cell: precision × how the step is run × plan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for how, precision in itertools.product(("eager", "captured", "compiled"), _PRECISIONS):
        if how == "captured" and (precision == "fp16" or machine.device == "cpu"):
            continue
        if how == "compiled" and precision != "bf16":
            continue
        begin: dict[str, Any] = {"precision": precision, "how": how}
        bare = bits(machine, precision, how, None)
        again = bits(machine, precision, how, None)
        if bare != again:
            yield {**begin, "figure": "repeats", "met": None, "why": f"{_first(bare, again)} differs without the tool"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name, plan in plans(Path(folder)).items():
                if how == "compiled" and name not in _COMPILED[: 1 if machine.rehearse else None]:
                    continue
                watched = bits(machine, precision, how, plan)
                told = {} if bare == watched else {"first": _first(bare, watched)}
                yield {**begin, "figure": "bits", "plan": name, "tensors": len(bare), "met": not told, **told}


def bits(machine: Machine, precision: Precision, how: str, plan: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Train five steps and return the bytes of every loss, gradient, weight, moment and random state, by name."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.compiler.reset()
    training = prepare(machine, "small", precision, compiled=how == "compiled", captured=how == "captured")
    told: dict[str, bytes] = {}

    def step(i: int) -> None:
        told[f"loss of step {i}"] = bits_of(training.step(i))

    if plan is None:
        for i in range(STEPS):
            step(i)
    else:
        options = {"console": False, "on_error": "raise", **plan}
        with trainprobe.watch(training.model, training.optimizer, options) as probe:
            for i in range(STEPS):
                with probe.step():
                    step(i)
    gradients = {f"gradient of {name}": bits_of(p.grad) for name, p in training.model.named_parameters()}
    return {**told, **gradients, **state_bits(training.model, training.optimizer, machine.device)}


def _first(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> str:
    return next((name for name in {**a, **b} if a.get(name) != b.get(name)), "nothing")
