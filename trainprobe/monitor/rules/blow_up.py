"""A training that diverges in its first steps: the loss far above its start after an update larger than the weight.

Judged from the first collected step, without a warm-up, until `window` steps have been collected. Two signs must come together:

- The loss is above `loss_ratio` times its first value at two collected steps in a row, or not finite after one such step, and
  was positive at every step before. Without a loss, or if it was below zero once, the norm over all gradients counts: it is
  above `norm_ratio` times its first value and has at least doubled at each of the last three steps, and the loss is not below
  its start.
- At one of the last eight collected steps, the norm of a weight with two or more dimensions and elements changed by more than
  `update_ratio` times its value, or its update, if updates are collected, was that large. Weights that begin at zero or with an
  absolute maximum below 0.001 (a zero-initialised output layer, the second factor of LoRA) are left out.

One sign alone is no alarm. A loss around zero jumps by any factor, and the loss of an adversary or a critic rises normally. A
regression that starts far away moves small weights by several times their size while its loss falls, and the gradients of a
log-likelihood grow as its noise shrinks. Reported once a run.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding, Site
from trainprobe.monitor.frames import F64, I64, Frame, Selection
from trainprobe.monitor.memory import Memory, text_series
from trainprobe.monitor.rules import Patterns, RuleOptions, norms_of_gradients
from trainprobe.monitor.scalar_names import scalar

SMALL = 1e-3  # absolute maximum of a weight that begins at nothing
GROWING = 3  # collected steps in a row
NEAR = 8  # collected steps in which what a large update causes shows itself


class Options(RuleOptions):
    """Settings of the rule `blow_up`."""

    loss_ratio: float = 8.0
    """A loss of so many times its first value has blown up."""
    norm_ratio: float = 64.0
    """The same for the norm over all gradients."""
    update_ratio: float = 1.0
    """An update of so many times the weight is too large."""
    window: int = 64
    """How many collected steps are judged; later ones are for `spike` and `drift`."""


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find the step at which the numbers began to explode, and the parameter whose update was the largest there."""
    count = memory.numbers["count"] = memory.numbers.get("count", 0.0) + 1
    if count > options.window or "told" in memory.numbers:
        return []
    _look_at_updates(frame, memory, options)
    what = _loss(frame, memory, options) or _norms(frame, memory, options)
    if what is None or "step" not in memory.numbers:
        return []
    memory.numbers["told"] = 1.0
    return [_finding(frame, memory, options, what)]


@cache
def _weights(names: Patterns) -> tuple[Selection, ...]:
    return (Selection(("parameter",), ("value", "value_after", "update"), ("norm",), names),)


@cache
def _sizes(names: Patterns) -> tuple[Selection, ...]:
    return (Selection(("parameter",), ("value",), ("absmax",), names),)


def _look_at_updates(frame: Frame, memory: Memory, options: Options) -> None:
    """Remember the first of the recent steps with an update larger than its weight, and the parameter of the largest."""
    found, count = _ratios(frame, memory, options), memory.numbers["count"]
    if count - memory.numbers.get("large at", -np.inf) <= NEAR:
        return
    memory.numbers.pop("step", None)
    if found:
        ratio, row = max(found)
        about = {"step": float(frame.step), "ratio": ratio, "row": float(row), "many": float(len(found))}
        memory.numbers |= about | {"large at": count}


def _ratios(frame: Frame, memory: Memory, options: Options) -> list[tuple[float, int]]:
    """Return (‖Δw‖ / ‖w‖, row) of each weight where that is too large."""
    small = _begins_small(frame, memory, options)
    places, rows = memory.watch(frame, _weights(options.names))
    by_name = memory.worked_out("slots", places, lambda: _by_name(frame, places, rows))
    norm, before = dict(zip(rows.tolist(), frame.values[places].tolist(), strict=True)), memory.array("before", fill=np.nan)
    found: list[tuple[float, int]] = []
    for name, slots in by_name.items():
        value = slots["value"]
        was, now = norm[value], norm.get(slots.get("value_after", -1), norm[value])
        change = norm[slots["update"]] if "update" in slots else abs(now - was)
        ratio = _times(change, was)
        ratio = max(ratio, _times(abs(was - before[value]), before[value]))
        before[value] = now
        if ratio > options.update_ratio and not small.get(name, True):
            found.append((ratio, value))
    return found


def _by_name(frame: Frame, places: I64, rows: I64) -> dict[str, dict[str, int]]:
    """Return parameter → slot → row, of those of at least two dimensions."""
    found: dict[str, dict[str, int]] = {}
    numbers = frame.table.addresses_of(frame.at[places]).tolist()
    for number, row in zip(numbers, rows.tolist(), strict=True):
        if frame.table.dimensions[number] >= 2:
            address = frame.table.addresses[number]
            found.setdefault(address.name, {}).setdefault(address.slot, row)
    return {name: slots for name, slots in found.items() if "value" in slots}


def _begins_small(frame: Frame, memory: Memory, options: Options) -> dict[str, bool]:
    """Return parameter → whether it was zero, or nearly, when it was first seen."""
    places, rows = memory.watch(frame, _sizes(options.names))
    first = memory.array("absmax", fill=-1.0)
    first[rows] = np.where(first[rows] < 0, frame.values[places], first[rows])
    names = [frame.table.series[number].address.name for number in frame.at[places].tolist()]
    return {name: not size >= SMALL for name, size in zip(names, first[rows].tolist(), strict=True)}


def _times(change: float, was: float) -> float:
    return change / was if was > 0 and np.isfinite(was) and np.isfinite(change) else 0.0


def _loss(frame: Frame, memory: Memory, options: Options) -> str | None:
    """Return the words for a loss that has left its start by far; None for one that has not, or that has no scale."""
    loss = scalar(frame.scalars, "loss")
    if loss is None:
        return None
    first = memory.numbers.setdefault("loss", loss)
    memory.numbers.setdefault("start", loss)
    if loss <= 0 or not np.isfinite(first):
        memory.numbers["loss"] = np.nan
        return None
    rose = memory.numbers.get("up", 0.0) > 0  # from an ordinary loss straight to NaN is for the rule `nonfinite`
    up = loss > options.loss_ratio * first if np.isfinite(loss) else rose
    held = memory.numbers["up"] = memory.numbers.get("up", 0.0) + 1 if up else 0.0
    return f"the loss rose from {first:.4g} to {loss:.4g}" if held >= 2 else None


def _norms(frame: Frame, memory: Memory, options: Options) -> str | None:
    """Return the words for gradients that grow by factors, step after step, where no loss can be judged."""
    places, _ = memory.watch(frame, norms_of_gradients(options.names))
    norm = _joined(frame.values[places])
    before = memory.numbers.get("norm", np.nan)
    memory.numbers["norm"] = norm
    growing = memory.numbers["growing"] = memory.numbers.get("growing", 0.0) + 1 if norm >= 2 * before else 0.0
    first = memory.numbers.setdefault("first norm", norm) if norm > 0 else np.nan
    loss, start = scalar(frame.scalars, "loss"), memory.numbers.get("start", np.nan)
    falls = loss is not None and loss < start
    if falls or np.isfinite(memory.numbers.get("loss", np.nan)) or growing < GROWING or not norm > options.norm_ratio * first:
        return None
    return f"the norm over all gradients rose from {first:.4g} to {norm:.4g}, at least twofold at each of {GROWING} steps"


def _joined(norms: F64) -> float:
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum(norms**2)))


def _finding(frame: Frame, memory: Memory, options: Options, what: str) -> Finding:
    step, ratio, many = int(memory.numbers["step"]), memory.numbers["ratio"], int(memory.numbers["many"])
    name = text_series(list(memory.keys)[int(memory.numbers["row"])]).address.name
    others = f", and those of {many - 1} other weights were too" if many > 1 else ""
    return options.found(
        frame,
        f"{what}. The update of {name} at step {step} was {ratio:.3g} times as large as the weight{others}",
        Site("parameter", name, "value", 0),
        measured=ratio,
        expected=f"at most {options.update_ratio:g}",
        next="lower the learning rate, begin with a warm-up, or clip the gradients",
    )
