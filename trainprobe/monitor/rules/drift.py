"""A level that creeps away: the recent level of a series against its own long-term level, on the log scale.

With x = ln|value|, fast and slow exponential means f += (x - f)/`fast` and s += (x - s)/`slow`, a series drifts when

    f - s > max(ln `limit`, 6 σ / √(2 · `fast`))        for `patience` collected steps in a row

with σ² the mean of (x - f)², so that the second term is what the noise of single batches moves f, and its lowest value, by.
For the loss the limit is `loss_limit` and s is the lowest f so far, because a healthy loss never goes back, but after a warm
restart: for 2 · `fast` collected steps after the learning rate has more than doubled from one to the next s is f. Where a
setting is announced (`monitor/announced.py`) all levels begin anew. A single value enters clipped to a factor of three. A loss
whose targets move, as where they are bootstrapped, does rise, and the gradient of an error grows with its root then. So a loss
that has risen less than `loss_limit` to the power of 8 is a note, unless the norm over all gradients has grown as far as the
loss since its lowest, or the learning rate rises too.
After a finding s starts anew at f, and the limit is squared. Only upward drift is judged: a level that falls is what training
does. A loss that was below zero once (a policy's objective, a likelihood of densities) has no level on a log scale, and is not
judged. Parts of a loss, losses of validation, and all losses where optimizers take turns (adversaries) have the limit of norms.
What lies below a millionth of the largest value of its series is rounding, and taken for that millionth. The norm over all
gradients is a series too, so that one that grows where nothing clips is found.

A weight drifts by itself when its norm changes by `weight_limit` within 32 collected steps, and that is three times what it
has done lately (faded by 1/64 a step) and three times what the other weights do in the middle. In 63 healthy trainings no
weight that changed so far did 0.7 times as much.

Source: moving average convergence/divergence as in process control (Roberts, 1959, for the exponential mean).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding, Site
from trainprobe.monitor.announced import announced
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection
from trainprobe.monitor.limits import above_rounding, falling, limits, losses
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at, norms_of_gradients
from trainprobe.monitor.scalar_names import scalar

_CLIPPED = float(np.log(3))
_SPAN = 32  # collected steps over which the change of a weight is taken
_BY_ITSELF = 3.0  # times what it did before, and what others do
_STILL = 0.02  # a change of 2 % is none
_ALONE = 8  # the power of the limit beyond which a loss that rises alone is an alarm
_RIPE = 4  # collected steps in a row


class Options(RuleOptions):
    """Settings of the rule `drift`."""

    limit: float = 16.0
    """How many times its long-term level a norm may reach."""
    loss_limit: float = 1.2
    """The same for the loss."""
    weight_limit: float = 1.35
    """By how many times the norm of a weight may change within 32 collected steps where no other does."""
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
    """Find the series whose recent level has left its long-term level, and the weights that go off by themselves."""
    restarted = _restarted(frame, memory, options)
    if announced(frame, memory):
        memory.array("count", fill=0)[:] = 0
    found = [f for f in (_levels(frame, memory, options, restarted), _weights(frame, memory, options)) if f is not None]
    memory.numbers["lasts"] = float(bool(found) or _still(memory))
    return found


def lasts(memory: Memory) -> bool:
    """Tell whether a level is away at this step too."""
    return memory.numbers.get("lasts", 0.0) > 0


def _still(memory: Memory) -> bool:
    """Tell whether something that was found is away, further than when it began anew."""
    return any(
        bool((memory.array(f"{name}.held", fill=0) > 0).any()) for name in ("left", "off") if f"{name}.held" in memory.arrays
    )


def _levels(frame: Frame, memory: Memory, options: Options, restarted: bool) -> Finding | None:
    places, rows = memory.watch(frame, _chosen(options.names))
    if not places.size:
        return None
    limit = limits(frame, memory, places, rows, loss=options.loss_limit, norms=options.limit)
    is_loss, loss = losses(frame, memory, places, rows), falling(frame, memory, places, rows)
    values = frame.values[places]
    total = _norm_of_gradients(frame, memory, options)
    if total is not None:
        row = memory.row("all gradients")
        places, rows, values = np.append(places, -1), np.append(rows, row), np.append(values, total)
        limit, is_loss, loss = np.append(limit, options.limit), np.append(is_loss, False), np.append(loss, False)
    size = above_rounding(memory, rows, np.abs(values))
    signed = memory.array("signed", fill=False)
    signed[rows] |= values < 0
    usable = np.isfinite(size) & (size > 0) & (limit > 0) & ~(signed[rows] & is_loss)
    rows, places, limit, loss = rows[usable], places[usable], limit[usable], loss[usable]
    fast, slow, noise = _means(memory, options, rows, np.log(size[usable]), loss, restarted)
    least = np.maximum(np.log(limit) * 2 ** memory.array("told", fill=0.0)[rows], 6 * noise / np.sqrt(2 * options.fast))
    left = (fast - slow > least) & (memory.array("count", fill=0)[rows] > options.warmup)
    ripe = memory.lasting("left", rows, left) >= options.patience
    if total is not None:
        lowest = rows[loss & (fast <= slow)]
        memory.array("gradients then", fill=np.nan)[lowest] = memory.array("fast", fill=0.0)[memory.row("all gradients")]
    if not ripe.any():
        return None
    memory.array("slow", fill=0.0)[rows[ripe]] = fast[ripe]
    memory.array("told", fill=0.0)[rows[ripe]] += 1
    worst = int(np.argmax(np.where(ripe, fast - slow, -np.inf)))
    recent, usual = float(np.exp(fast[worst])), float(np.exp(slow[worst]))
    finding = _finding(frame, options, int(places[worst]), recent, usual, places[ripe & (places >= 0)], _rate_in_words(memory))
    alone = loss[worst] and ripe.sum() == 1 and recent < usual * options.loss_limit**_ALONE
    return (
        replace(finding, severity="info")
        if alone and _gradients_stay(memory, rows, loss, fast[worst] - slow[worst])
        else finding
    )


def _gradients_stay(memory: Memory, rows: I64, loss: Bools, rise: float) -> bool:
    """Tell whether neither the rate nor the norm over all gradients has risen as the loss did since its lowest."""
    row = memory.row("all gradients")
    if not memory.array("count", fill=0)[row] or _rate_in_words(memory):
        return False
    then = float(memory.array("gradients then", fill=np.nan)[rows[loss]].max())
    return bool(memory.array("fast", fill=0.0)[row] - then < rise)


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (
        Selection(("scalar",), (), ("value",), names),
        Selection(("module",), ("output",), ("norm",), names),
    )


@cache
def _values(names: Patterns) -> tuple[Selection, ...]:
    return (Selection(("parameter",), ("value",), ("norm",), names),)


def _norm_of_gradients(frame: Frame, memory: Memory, options: Options) -> float | None:
    """Return the norm over all gradients that were collected."""
    places, _ = memory.watch(frame, norms_of_gradients(options.names))
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum(frame.values[places] ** 2))) if places.size else None


def _weights(frame: Frame, memory: Memory, options: Options) -> Finding | None:
    """Find the weight that changes most by itself."""
    every, _ = memory.watch(frame, _values(options.names))
    numbers = frame.table.addresses_of(frame.at[every])
    places = every[(np.array(frame.table.dimensions)[numbers] >= 2) & (frame.values[every] > 0)]
    if not places.size:
        return None
    rows, n = memory.rows(frame.table, frame.at[places]), int(memory.numbers.get("weights", 0))
    memory.numbers["weights"] = n + 1
    x, at = np.log(frame.values[places]), n % _SPAN
    before, changes = (memory.array(name, width=_SPAN, fill=np.nan) for name in ("before", "changes"))
    past = memory.array("past", fill=0.0)
    past[rows] = np.fmax(past[rows] * (1 - 1 / 64), changes[rows, at])
    change = x - before[rows, at]
    changes[rows, at], before[rows, at] = np.abs(change), x
    far = np.abs(change) > np.log(options.weight_limit)
    if n < options.warmup + _SPAN or not far.any():
        memory.lasting("off", rows, np.zeros_like(far))
        return None
    others = np.nanmedian(np.abs(change)) if places.size > 2 else 0.0
    off = far & (np.abs(change) > _BY_ITSELF * np.maximum(np.maximum(past[rows], others), _STILL))
    ripe = memory.newly("told off", rows, memory.lasting("off", rows, off) >= _RIPE, rearm=_SPAN)
    if not ripe.any():
        return None
    worst = int(np.argmax(np.where(ripe, np.abs(change), -np.inf)))
    now, was = float(np.exp(x[worst])), float(np.exp(x[worst] - change[worst]))
    return _weight_finding(frame, options, int(places[worst]), now, was, _rate_in_words(memory))


def _restarted(frame: Frame, memory: Memory, options: Options) -> bool:
    """Tell whether the learning rate jumped up a short while ago."""
    rate, before = scalar(frame.scalars, "learning rate"), memory.numbers.get("rate", 0.0)
    left = memory.numbers.get("restarted", 0.0) - 1
    if rate is not None and 0 < 2 * before < rate:
        left = 2.0 * options.fast
    memory.numbers["restarted"] = max(left, 0.0)
    memory.numbers["rate"] = before if rate is None else rate
    usual = memory.numbers.get("usual rate", memory.numbers["rate"])
    memory.numbers["usual rate"] = usual + (memory.numbers["rate"] - usual) / (2 * options.fast)
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


def _rate_in_words(memory: Memory) -> str:
    """Say that the rate has risen with it, where it has."""
    now, usual = memory.numbers.get("rate", 0.0), memory.numbers.get("usual rate", 0.0)
    return f"; the learning rate rises too, to {now:.4g} from {usual:.4g} in the middle of late" if now > 1.2 * usual else ""


def _finding(frame: Frame, options: Options, place: int, recent: float, usual: float, ripe: I64, cause: str) -> Finding:
    series = frame.table.series[frame.at[place]] if place >= 0 else "the norm over all gradients"
    others = ripe.size - (place >= 0)
    more = f"; {others} other series drifted with it" if others > 0 else ""
    return options.found(
        frame,
        f"{series} has crept up to {recent:.4g}, {recent / usual:.3g} times its long-term level {usual:.4g}{more}{cause}",
        Site("scalar", "gradient norm", "value") if isinstance(series, str) else series.address.site(),
        measured=recent,
        expected=usual,
        names=names_at(frame, ripe),
        next="find the step at which the curve begins to rise, on the page that `trainprobe report {output}` writes",
    )


def _weight_finding(frame: Frame, options: Options, place: int, now: float, was: float, cause: str) -> Finding:
    address = frame.table.series[frame.at[place]].address
    return options.found(
        frame,
        f"the weight {address.name} moves far more than before. Its norm went from {was:.4g} to {now:.4g} within "
        f"{_SPAN} collected steps, three times as far as before and as other weights{cause}",
        address.site(),
        measured=now,
        expected=was,
        names=(address.name,),
        next="look at the learning rate and the weight decay of this parameter, and at what else writes to it",
    )
