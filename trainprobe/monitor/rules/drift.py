"""A level that creeps away: the recent level of a series against its own long-term level, on the log scale.

With x = ln|value|, fast and slow exponential means f += (x - f)/`fast` and s += (x - s)/`slow`, a series drifts when

    f - s > max(ln `limit`, 6 σ / √(2 · `fast`))        for `patience` collected steps in a row

with σ² the mean of (x - f)², so that the second term is what the noise of single batches moves f, and its lowest value, by.
For the loss the limit is `loss_limit` and s is the lowest f so far, because a healthy loss never goes back, but after a warm
restart: for 2 · `fast` collected steps after the learning rate has more than doubled from one to the next s is f. A single
value enters clipped to a factor of three. After a finding s starts anew at f, and the limit is squared. Only upward drift is
judged: a level that falls is what training does. A loss that was below zero once (a policy's objective, a likelihood of
densities) has no level on a log scale, and is not judged. Parts of a loss, losses of validation, and all losses where
optimizers take turns (adversaries) have the limit of norms. What lies below a millionth of the largest value of its series is
rounding, and taken for that millionth.

Source: moving average convergence/divergence as in process control (Roberts, 1959, for the exponential mean).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection
from trainprobe.monitor.limits import above_rounding, falling, limits, losses
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at
from trainprobe.monitor.scalar_names import scalar

_CLIPPED = float(np.log(3))


class Options(RuleOptions):
    """Settings of the rule `drift`."""

    limit: float = 16.0
    """How many times its long-term level a norm may reach."""
    loss_limit: float = 1.2
    """The same for the loss."""
    fast: int = 16
    """Time constant of the recent level, in collected steps."""
    slow: int = 256
    """Time constant of the long-term level, in collected steps."""
    warmup: int = 64
    """How many collected steps pass before anything is judged."""
    patience: int = 16
    """For how many collected steps the level must have left."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.warmup + self.patience


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find the series whose recent level has left its long-term level."""
    places, rows = memory.watch(frame, _chosen(options.names))
    if not places.size:
        return []
    limit = limits(frame, memory, places, rows, loss=options.loss_limit, norms=options.limit)
    size = above_rounding(memory, rows, np.abs(frame.values[places]))
    signed = memory.array("signed", fill=False)
    signed[rows] |= frame.values[places] < 0
    usable = np.isfinite(size) & (size > 0) & (limit > 0) & ~(signed[rows] & losses(frame, memory, places, rows))
    loss, restarted = falling(frame, memory, places, rows), _restarted(frame, memory, options)
    rows, places, limit, loss = rows[usable], places[usable], limit[usable], loss[usable]
    fast, slow, noise = _means(memory, options, rows, np.log(size[usable]), loss, restarted)
    least = np.maximum(np.log(limit) * 2 ** memory.array("told", fill=0.0)[rows], 6 * noise / np.sqrt(2 * options.fast))
    left = (fast - slow > least) & (memory.array("count", fill=0)[rows] > options.warmup)
    ripe = memory.lasting("left", rows, left) >= options.patience
    if not ripe.any():
        return []
    memory.array("slow", fill=0.0)[rows[ripe]] = fast[ripe]
    memory.array("told", fill=0.0)[rows[ripe]] += 1
    worst = int(np.argmax(np.where(ripe, fast - slow, -np.inf)))
    return [_finding(frame, options, int(places[worst]), float(np.exp(fast[worst])), float(np.exp(slow[worst])), places[ripe])]


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (
        Selection(("scalar",), (), ("value",), names),
        Selection(("module",), ("output",), ("norm",), names),
        Selection(("parameter",), ("value",), ("norm",), names),
    )


def _restarted(frame: Frame, memory: Memory, options: Options) -> bool:
    """Tell whether the learning rate jumped up a short while ago."""
    rate, before = scalar(frame.scalars, "learning rate"), memory.numbers.get("rate", 0.0)
    left = memory.numbers.get("restarted", 0.0) - 1
    if rate is not None and 0 < 2 * before < rate:
        left = 2.0 * options.fast
    memory.numbers["restarted"] = max(left, 0.0)
    memory.numbers["rate"] = before if rate is None else rate
    return left > 0


def _means(memory: Memory, options: Options, rows: I64, x: F64, loss: Bools, restarted: bool) -> tuple[F64, F64, F64]:
    """Update and return the recent and the long-term level, plain means at first, and the noise of a single value."""
    count, fast, slow = memory.array("count", fill=0), memory.array("fast", fill=0.0), memory.array("slow", fill=0.0)
    n = count[rows]
    noise = memory.array("noise", fill=0.0)
    recent, usual, squares = fast[rows], slow[rows], noise[rows]
    moved = np.where(n == 0, x, recent + np.minimum(np.maximum(x - recent, -_CLIPPED), _CLIPPED))
    n += 1
    share = np.minimum(n, options.slow)
    squares += (np.where(n == 1, 0.0, moved - recent) ** 2 - squares) / share
    recent += (moved - recent) / np.minimum(n, options.fast)
    lowest = np.where((n < options.fast) | restarted, recent, np.minimum(usual, recent))
    usual = np.where(loss, lowest, usual + (moved - usual) / share)
    count[rows], fast[rows], slow[rows], noise[rows] = n, recent, usual, squares
    return recent, usual, np.sqrt(squares)


def _finding(frame: Frame, options: Options, place: int, recent: float, usual: float, ripe: I64) -> Finding:
    series = frame.table.series[frame.at[place]]
    others = f"; {ripe.size - 1} other series drifted with it" if ripe.size > 1 else ""
    return Finding(
        rule="drift",
        severity=options.severity,
        message=f"{series} has crept up to {recent:.4g}, {recent / usual:.3g} times its long-term level {usual:.4g}{others}",
        step=frame.step,
        place=frame.place,
        site=series.address.site(),
        measured=recent,
        expected=usual,
        names=names_at(frame, ripe),
        next="find the step at which the curve begins to rise, on the page that `trainprobe report {output}` writes",
    )
