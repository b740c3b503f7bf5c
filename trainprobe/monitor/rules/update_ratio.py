"""An update that is too large or too small for its weight: ‖Δw‖ / ‖w‖ out of range.

Judged for parameters of two or more dimensions and elements with ‖w‖ > 0, after `warmup` collected steps, when the ratio leaves
[`low`, `high`] at `patience` collected steps in a row; the lower side only while the learning rate is not zero. Where the
update itself is not collected, |‖w_now‖ - ‖w_before‖| / ‖w_before‖ of neighbouring collected steps, which is at most the
ratio over these steps, serves the upper side.

Sources: the rule of thumb that healthy ratios lie near 1e-3 (Karpathy, CS231n notes on learning); the trust ratios of LAMB (You
et al., 2020).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Frame, Selection
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at
from trainprobe.monitor.scalar_names import scalar


class Options(RuleOptions):
    """Settings of the rule `update_ratio`."""

    low: float = 1e-9
    """Smallest ratio that is in order."""
    high: float = 0.5
    """Largest ratio that is in order."""
    warmup: int = 10
    """How many collected steps pass before anything is judged."""
    patience: int = 3
    """At how many collected steps in a row it must be out of range; twenty times as many on the lower side."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.warmup + self.patience


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find parameters whose update is out of range."""
    places, _ = memory.watch(frame, _chosen(options.names))
    values, updates = memory.worked_out("pairs", places, lambda: _pairs(frame, places))
    if not values.size:
        return []
    rows = memory.rows(frame.table, frame.at[values])
    ratio = _ratio(frame, memory, rows, values, updates)
    age = memory.array("age", fill=0)
    age[rows] += 1
    judged = np.isfinite(ratio) & (age[rows] > options.warmup)
    rate = scalar(frame.scalars, "learning rate")
    moving = rate is None or rate > 0
    big = memory.lasting("high", rows, judged & (ratio > options.high)) >= options.patience
    small_now = judged & (ratio < options.low) & (updates >= 0) & moving
    small = memory.lasting("low", rows, small_now) >= 20 * options.patience
    ripe = memory.newly("out", rows, big | small)
    if not ripe.any():
        return []
    worst = int(np.argmax(np.where(ripe, np.abs(np.log(np.maximum(ratio, 1e-30)) - np.log(1e-3)), -1.0)))
    return [_finding(frame, options, int(values[worst]), float(ratio[worst]), names_at(frame, values[ripe]))]


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (Selection(("parameter",), ("value", "update"), ("norm",), names),)


def _pairs(frame: Frame, places: I64) -> tuple[I64, I64]:
    """Return the places of weights and of their updates (-1 where not collected)."""
    weights: dict[str, int] = {}
    updates: dict[str, int] = {}
    for place in places.tolist():
        number = int(frame.at[place])
        address = frame.table.series[number].address
        if frame.table.dimensions[int(frame.table.addresses_of(np.array([number]))[0])] >= 2:
            (weights if address.slot == "value" else updates).setdefault(address.name, place)
    return np.array(list(weights.values()), dtype=np.int64), np.array([updates.get(n, -1) for n in weights], dtype=np.int64)


def _ratio(frame: Frame, memory: Memory, rows: I64, values: I64, updates: I64) -> F64:
    before = memory.array("before", fill=np.nan)
    norm, known = frame.values[values], updates >= 0
    with np.errstate(all="ignore"):
        bound = np.abs(norm - before[rows]) / before[rows]
        exact = frame.values[np.maximum(updates, 0)] / norm
    before[rows] = norm
    return np.where(norm > 0, np.where(known, exact, bound), np.nan)


def _finding(frame: Frame, options: Options, place: int, ratio: float, names: tuple[str, ...]) -> Finding:
    address = frame.table.series[frame.at[place]].address
    too = "large" if ratio > options.high else "small"
    others = f", and those of {len(names) - 1} other parameters" if len(names) > 1 else ""
    return options.found(
        frame,
        f"the update of {address.name} is {ratio:.3g} of its weight, too {too}{others}",
        address.site(),
        measured=ratio,
        expected=f"{options.low:g} to {options.high:g}",
        names=names,
        next="check the learning rate of its parameter group, and the warm-up",
    )
