"""What is learnt of a trainer: its loss, its step, its micro-batches, and how its ranks share gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.log_lines import say as log
from trainprobe.preflight.batches import joined
from trainprobe.preflight.examine import preflight
from trainprobe.preflight.report import BROKEN, BY_DESIGN, Line, Report


@dataclass(slots=True)
class Training:
    """What a preflight is given: see `trainprobe.preflight`. micros: the micro-batches of the first update.

    together: runs micro-batches of this rank while the other ranks run theirs, and leaves the gradients of the update; None
    where it was not seen how ranks share them. copied: whether the optimizer may hold copies of the parameters. scored: whether
    the loop detaches a part of a loss of log-probabilities, as an advantage is.
    """

    loss: Callable[[Any, Any], Any]
    step: Callable[[Any, list[Any]], Any] | None
    model: Any
    micros: list[Any]
    together: Callable[[list[Any]], Any] | None = None
    copied: bool = False
    scored: bool = False


def tested(training: Training, optimizers: list[Any], **options: Any) -> Report:
    """Test the micro-batches of an update as one batch; the first alone where the loss cannot be made of all."""
    micros, count = training.micros, len(training.micros) if training.step else 1
    test = partial(preflight, training.loss, training.model, optimizer=optimizers, **options)
    if len(micros) == 1:
        report = test(micros[0], step=training.step, micro_batches=1)
        return replace(report, lines=[_of_policy(line) for line in report.lines]) if training.scored else report
    whole = attempt(lambda: test(joined(micros), step=training.step, micro_batches=count), otherwise=fault_text)
    if not isinstance(whole, str):
        return whole
    log(f"the loss of {len(micros)} micro-batches in one cannot be made ({whole}): one is tested", severity="warning")
    return test(micros[0])


def _of_policy(line: Line) -> Line:
    """Return what is said of a property where a detached advantage weighs log-probabilities: its slope is not autograd's."""
    if line.name != "gradient" or line.status != BROKEN:
        return line
    told = line.text.partition(";")[0]
    return replace(line, status=BY_DESIGN, text=f"the loop detaches a part of a loss of log-probabilities: {told}")


def unwrapped(model: Any) -> Any:
    """Return what a wrapper for several ranks computes with: DDP, DeepSpeed's engine, Megatron's DDP."""
    return model.module if type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine") else model


def mean_over_ranks(model: nn.Module, step: Callable[[list[Any]], Any]) -> Callable[[list[Any]], None]:
    """Return a step that leaves the mean of the ranks' gradients, as DeepSpeed and Megatron do in buffers of their own."""

    def together(micros: list[Any]) -> None:
        step(micros)
        for p in (p for p in model.parameters() if p.requires_grad):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    return together
