"""The order of a preflight: keep the state, measure the floor, test one property after the other, give the state back."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.training_guard import TrainingGuard
from trainprobe.errors import UsageError, did_you_mean
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.page import charts as charts_of
from trainprobe.preflight.properties import EXTRA, ORDER
from trainprobe.preflight.report import BROKEN, NOT_REACHED, Line, Report, broken, not_applicable
from trainprobe.preflight.subject import Subject, no_shards

UNREPEATABLE = 1e-2  # relative distance of two runs of one step above which nothing can be told from another


def preflight(
    loss: Callable[[Any, Any], Any],
    model: Any,
    batch: Any,
    *,
    step: Callable[[Any, list[Any]], Any] | None = None,
    micro_batches: int | None = None,
    optimizer: Any = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    seconds: float = 60.0,
    overfit: bool = False,
    charts: bool = False,
) -> Report:
    """Test what a loss and a model do on one batch, and give back every bit of their state.

    loss: `loss(model, batch)` returns the scalar whose gradient is trained, or something with it as `loss`. model: a module in
    the mode in which it is trained. batch: tensors in dicts, tuples or lists, rows first. step: `step(model, micro_batches)`
    runs forward and backward of each micro-batch as the trainer does, without the update, and returns the loss that is
    reported; by default every loss is divided by the number of micro-batches. micro_batches: how many of them the trainer
    accumulates, where nothing is given 2 with a step and 1 without. optimizer: one or a list. only, skip: names of properties.
    seconds: after which no further property begins. overfit: whether the batch is trained on for 20 steps, which are undone.
    charts: whether the report has charts of what changes with what: see `trainprobe.preflight.page`.
    Raises UsageError for arguments that have no meaning, and what the loss itself raises.
    """
    wanted = checked(only, skip, overfit)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    if not callable(getattr(model, "named_parameters", None)):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module: preflight(loss, model, batch)")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that is trained: preflight(loss, model, batch)")
    if shard := no_shards(model):
        raise UsageError(shard)
    start = time.monotonic()
    with _eager(), TrainingGuard(model, optimizers) as guard:
        subject = Subject(loss, model, Batch(batch), guard)
        subject.step, subject.micro_batches, subject.optimizers = step, micro_batches or (2 if step else 1), optimizers
        subject.measure()
        lines = [_tested(name, subject, start + seconds) for name in wanted]
        subject.now = "charts"
        drawn = attempt(charts_of, subject, otherwise=lambda _: {}) if charts and subject.base.finite else {}
    floor = max(subject.eps, *vars(subject).get("floors", [0.0])[:1])
    return Report(lines, sum(map(subject.passes, subject.rows_run)), round(time.monotonic() - start, 3), floor, drawn)


def _eager() -> AbstractContextManager[Any]:
    """Run compiled models as they are written: the modules inside are seen, and no further shape is compiled."""
    stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    return nullcontext() if stance is None else stance("force_eager")


def checked(only: Collection[str], skip: Collection[str], overfit: bool = False) -> list[str]:
    """Return the properties that are wanted, in the order of their value. Raises UsageError for a name that none has."""
    every = [*ORDER, *EXTRA]
    for name in (*only, *skip):
        if name not in every:
            raise UsageError(f"there is no property {name!r}{did_you_mean(name, every)} (there are {', '.join(every)})")
    asked = only or (every if overfit else ORDER)
    return [name for name in every if (name in asked or (overfit and name in EXTRA)) and name not in skip]


def _tested(name: str, subject: Subject, end: float) -> Line:
    base, subject.now = subject.base, name
    if not base.finite:
        what = "a gradient is not finite" if isfinite(base.loss) else f"the loss is {base.loss}"
        line = broken(what) if name == "start" else not_applicable(what)
    elif subject.twice > UNREPEATABLE < subject.floors[0] and name not in ("start", "determinism", "update"):
        line = not_applicable(f"two runs of this step from one state differ by {subject.floors[0]:.1%}: see determinism")
    elif time.monotonic() > end:
        line = Line(NOT_REACHED, "the time was over: --seconds")
    else:
        examine = importlib.import_module(f"trainprobe.preflight.properties.{name}").examine
        line = attempt(examine, subject, otherwise=lambda fault: not_applicable(f"it could not be tested, {fault_text(fault)}"))
        subject.guard.rewind()
        if subject.still and line.status != BROKEN and name not in ("start", "determinism"):
            line = not_applicable("all gradients of this batch are zero: see start")
    return replace(line, name=name, passes=subject.passes(name))
