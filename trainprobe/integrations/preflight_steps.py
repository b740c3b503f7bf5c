"""How a trainer of a framework makes its loss, read off the call that is running: Hugging Face's Trainer and Lightning's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from trainprobe.engine.capture.gathering import ranks
from trainprobe.engine.capture.step_gradients import differentiate
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.log_lines import say
from trainprobe.preflight.opened import closed, opened
from trainprobe.preflight.report import Report
from trainprobe.preflight.subject import scalar_of
from trainprobe.preflight.training import Training, mean_over_ranks, tested, unwrapped


@dataclass(slots=True)
class Found:
    """A training step of a framework that is running. make: returns the training of these micro-batches."""

    call: int
    batch: Any
    make: Callable[[list[Any]], Training]


def running_step() -> Found | None:
    """Return the step of a framework among the callers of this function."""
    frame, labels = sys._getframe(1), None
    while frame is not None:
        if frame.f_code.co_name == "compute_loss":  # which takes them out of the batch where it smooths them
            labels = frame.f_locals.get("labels")
        if frame.f_code.co_name == "training_step":
            held = frame.f_locals
            found = _of_frame(str(frame.f_globals.get("__name__", "")), held)
            if found is not None:
                if labels is not None and isinstance(found[0], dict):
                    found[0].setdefault("labels", _copied(labels))
                return Found(id(frame), *found)
        frame = frame.f_back
    return None


def _of_frame(module: str, held: dict[str, Any]) -> tuple[Any, Callable[[list[Any]], Training]] | None:
    """Return the batch of a call, and what makes a training of such batches. held: its variables."""
    if module == "transformers.trainer" and "inputs" in held:  # which it deletes before the backward pass
        return _copied(held["inputs"]), partial(of_transformers, held["self"], held["model"])
    if module.startswith(("lightning.pytorch.strategies", "pytorch_lightning.strategies")) and held.get("args"):
        batch, *rest = held["args"]
        if not held["self"].lightning_module.automatic_optimization:
            return None  # a loop of its own within the step
        return _copied(batch), partial(of_lightning, held["self"].lightning_module, rest)
    return None


def _copied(batch: Any) -> Any:
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return closed(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, opened(plain)))


class FirstStep:
    """The test of the first update of a training that goes on: every bit is given back.

    wanted: whether there is one. report: what was found, None before it and where nothing could be tested. Of several ranks it
    is that of the first whose rows show something broken, on all of them.
    """

    def __init__(self, wanted: bool) -> None:
        self.waits, self.micros = wanted, list[Any]()
        self.report: Report | None = None

    def add(self, batch: Any) -> None:
        """Keep a micro-batch as it was before it was used."""
        if self.waits:
            self.micros.append(_copied(batch))

    def test(self, make: Callable[[list[Any]], Training], optimizers: list[Any], probe: Any = None) -> None:
        """Test what was kept, once, and print it on the first rank. probe: looks away meanwhile."""
        if not self.waits:
            return
        self.waits = False
        if probe is not None:
            probe.pause()
        found = attempt(lambda: tested(make(self.micros), optimizers), otherwise=fault_text)
        if probe is not None:
            probe.resume()
        self.micros.clear()
        every: list[Any] = [found]
        if ranks() > 1:
            every = [None] * ranks()
            dist.all_gather_object(every, found)
        reports = [(rank, each) for rank, each in enumerate(every) if isinstance(each, Report)]
        rank, self.report = next((pair for pair in reports if pair[1].broken), reports[0] if reports else (0, None))
        if ranks() == 1 or dist.get_rank() == 0:
            bad, of = self.report is None or self.report.broken, f" of rank {rank}" if ranks() > 1 else ""
            say(f"preflight{of}\n{self.report or found}", severity="warning" if bad else "info")


def of_transformers(trainer: Any, model: Any, micros: list[Any]) -> Training:
    """Return the training of a Trainer of Hugging Face. model: as its `training_step` is given it."""
    inner = unwrapped(model)
    trained, engine = [p for p in inner.parameters() if p.requires_grad], type(model).__name__ == "DeepSpeedEngine"

    def count(batches: list[Any]) -> Any:
        return trainer._get_num_items_in_batch(batches, trainer.args.device)

    def loss(model: Any, batch: Any) -> Any:
        with _kept(trainer, trainer.args), trainer.compute_loss_context_manager():
            trainer.args.average_tokens_across_devices = False  # this rank alone
            return trainer.compute_loss(model, dict(batch), num_items_in_batch=count([batch]))

    def step(model: Any, micros: list[Any], alone: bool = True) -> float:
        share = 1 if engine else trainer.accelerator.gradient_accumulation_steps
        with _kept(trainer, trainer.args, trainer.accelerator):
            trainer.current_gradient_accumulation_steps = len(micros)
            if alone:
                trainer.args.average_tokens_across_devices = False
                trainer.accelerator.backward = lambda loss, **_: differentiate(loss / share, trained)
            items = count(micros)
            return float(sum(trainer.training_step(model, dict(micro), items) for micro in micros))

    if isinstance(model, nn.parallel.DistributedDataParallel):
        return Training(loss, step, inner, micros, partial(step, model, alone=False))
    return Training(loss, step, inner, micros, mean_over_ranks(inner, partial(step, inner)) if engine else None, engine)


@contextmanager
def _kept(*objects: Any) -> Generator[None]:
    """Give objects their attributes back, and what containers of numbers among these hold: the metrics that a step adds to."""
    held = [(x, {name: _if_plain(value) for name, value in vars(x).items()}) for x in objects]
    try:
        yield
    finally:
        for x, attributes in held:
            vars(x).clear()
            vars(x).update(attributes)


def _if_plain(value: Any) -> Any:
    plain = isinstance(value, dict | list) and all(isinstance(x, int | float | str | None) for x in tree_flatten(value)[0])
    return deepcopy(value) if plain else value


def of_lightning(module: Any, rest: list[Any], micros: list[Any]) -> Training:
    """Return the training of a LightningModule whose optimization is automatic. rest: what its step is given behind a batch."""
    strategy, parts = module.trainer.strategy, module.trainer.accumulate_grad_batches

    def loss(model: Any, batch: Any, run: Any = module.training_step) -> Any:
        with _silent(module), strategy.precision_plugin.train_step_context():
            return scalar_of(run(batch, *rest))

    def step(model: Any, micros: list[Any]) -> float:
        losses = [loss(model, micro) / parts for micro in micros]
        for part in losses:
            differentiate(part, [p for p in module.parameters() if p.requires_grad])
        return float(torch.stack([part.detach() for part in losses]).sum())

    def together(micros: list[Any]) -> None:
        for micro in micros:
            (loss(module, micro, strategy.training_step) / parts).backward()

    several = isinstance(strategy.model, nn.parallel.DistributedDataParallel)
    return Training(loss, step, module, micros, together if several else None)


@contextmanager
def _silent(module: Any) -> Generator[None]:
    """Let a module log nothing."""
    kept = {name: vars(module)[name] for name in ("log", "log_dict") if name in vars(module)}
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log, module.log_dict
        vars(module).update(kept)
