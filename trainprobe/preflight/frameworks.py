"""How a trainer of a framework makes its loss, read off the call that is running: Hugging Face's Trainer and Lightning's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from trainprobe.preflight.subject import scalar_of


@dataclass(slots=True)
class Training:
    """What a preflight is given: see `trainprobe.preflight`. micros: the micro-batches of the first update."""

    loss: Callable[[Any, Any], Any]
    step: Callable[[Any, list[Any]], Any] | None
    model: Any
    micros: list[Any]


@dataclass(slots=True)
class Found:
    """A training step of a framework that is running. make: returns the training of these micro-batches."""

    call: int
    batch: Any
    make: Callable[[list[Any]], Training]


def running_step() -> Found | None:
    """Return the step of a framework among the callers of this function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "training_step":
            held = frame.f_locals
            found = _of_frame(str(frame.f_globals.get("__name__", "")), held)
            if found is not None:
                return Found(id(frame), *found)
        frame = frame.f_back
    return None


def _of_frame(module: str, held: dict[str, Any]) -> tuple[Any, Callable[[list[Any]], Training]] | None:
    """Return the batch of a call, and what makes a training of such batches. held: its variables."""
    if module == "transformers.trainer":
        return _copied(held["inputs"]), partial(_of_transformers, held["self"], held["model"])
    if module.startswith(("lightning.pytorch.strategies", "pytorch_lightning.strategies")) and held.get("args"):
        batch, *rest = held["args"]
        if not held["self"].lightning_module.automatic_optimization:
            return None  # a loop of its own within the step
        return _copied(batch), partial(_of_lightning, held["self"].lightning_module, rest)
    return None


def _copied(batch: Any) -> Any:
    plain = dict(batch) if hasattr(batch, "keys") else batch
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, plain)


def _of_transformers(trainer: Any, model: Any, micros: list[Any]) -> Training:
    def count(batches: list[Any]) -> Any:
        return trainer._get_num_items_in_batch(batches, trainer.args.device)

    def loss(model: Any, batch: Any) -> Any:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, dict(batch), num_items_in_batch=count([batch]))

    def step(model: Any, micros: list[Any]) -> float:
        trainer.current_gradient_accumulation_steps = len(micros)
        items = count(micros)
        return float(sum(trainer.training_step(model, dict(micro), items) for micro in micros))

    return Training(loss, step, model, micros)


def _of_lightning(module: Any, rest: list[Any], micros: list[Any]) -> Training:
    trainer = module.trainer
    module.log = module.log_dict = lambda *_, **__: None

    def loss(model: Any, batch: Any) -> Any:
        with trainer.strategy.precision_plugin.train_step_context():
            return scalar_of(module.training_step(batch, *rest))

    def step(model: Any, micros: list[Any]) -> float:
        parts = [loss(model, micro) / trainer.accumulate_grad_batches for micro in micros]
        for part in parts:
            part.backward()
        return float(torch.stack([part.detach() for part in parts]).sum())

    return Training(loss, step, module, micros)
