"""A value far above all that its own series has lately been, judged by all series of the step together.

With x = ln|value|, every series has the probability p of its value beside its last `window` values (`monitor/tails.py`; of a
weight, x is the logarithm of |Δ ln norm|, by how much its norm changed since the collected step before). At a step there is a
spike, once `warmup` values are known, where

- p < α for the loss or a gradient norm, and it is above `loss_ratio` or `ratio` times its median; where it is
  twice all that is remembered, p < α/2 beside its last 32 values is enough: the older ones of a loss that falls steeply are far
  above what is usual now;
- twice the median of p over the gradients of all parameters is below α, and they are in the middle above `ratio` times theirs
  (four times that where there is a loss and none is rarer than 10^-2: a GPT on eight batches over and over was seen at 12):
  a batch that moves every layer a little is rarer than one layer that jumps by itself;
- m p < α for one of the m outputs of modules, gradients or updates, above `ratio` times its median; where the gradient of a
  single parameter jumps it is also above `parameter_ratio` times the largest that is remembered, as in 60 healthy trainings of
  small batches one was seen at 143 times its median and 16 times the largest of 128 values while the loss did not move;
- m p < α for one of the m weights, whose norm changed by a quarter from one step to the next; or
- a learning rate is above twice the largest that it has been, after `early` values.

α is 10^-5: at most one false alarm in 100,000 steps for each of these. Where noise has a tail so heavy that a loss of eight
times all that is remembered has p up to 5 · 10^-4, that is a spike too if the gradients of most parameters say so at 10^-2: a
loss that is close to 0 varies by decades, and hides on the log scale what nobody would overlook. What jumps is also z > `z`
robust standard deviations above its median, above all values that are remembered, and above the last four by a factor of
sqrt(ratio), so that a climb, as at the end of a warm-up, is no spike. Before `warmup` values only a jump that needs no
statistics is one: after `early` values, one of more than `early_ratio` times the largest so far.

A spike is one event from its first step until nothing is out of the ordinary for sixteen steps. It is told once, when it
begins, and named for its first place (`monitor/onsets.py`). While it lasts its values are not learnt, for 64 steps at most;
then they enter the history clipped to the alarm line, so that a lasting change of level is learnt. Where a noted setting
changed at its first step or the one before (`monitor/announced.py`), it is a note, and the level is moved.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.announced import announced
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection, Series
from trainprobe.monitor.limits import above_rounding, in_turns, limits
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.onsets import GRADIENTS, INPUTS, OTHERS, RATES, SCALARS, WEIGHTS, Onset, finding_of
from trainprobe.monitor.rules import Patterns, RuleOptions
from trainprobe.monitor.scalar_names import role_of
from trainprobe.monitor.tails import line, log_p, tail_of

RENEW = 8  # this and the next are powers of two
RECENT = 4
CALM = 16  # collected steps behind which an event is over
HELD = 64  # collected steps of an event that are not learnt
LEAST_SPREAD = 0.05
ALPHA = float(np.log(1e-5))
MOVED = float(np.log(1e-4))  # of a series that is told beside others
WRITTEN = 0.25  # by so much the norm of a weight changes at least
RISING = 1.2  # times the median of a rate: worth telling as a cause
RISES = float(np.log(2))  # of a rate, above all that it was
NEAR, FAR = float(np.log(5e-4)), 8.0  # of a loss that is so many times all that is remembered, with most gradients
BESIDE = float(np.log(1e-2))  # of most gradients, with such a loss
SEVERAL = 4  # gradients that can speak together
ALONE = 4.0  # times `ratio`, where no loss moves with them
LATE = 32  # of the remembered values of a loss, the last: what is before them may be far above what is usual now
ABOVE = 2.0  # times all that is remembered: samples of a rare source come again after more than 32 steps
_TAIL = ("u", "s", "k", "n")
_LATE_TAIL = ("late_u", "late_s", "late_k", "late_n")


class Options(RuleOptions):
    """Settings of the rule `spike`."""

    z: float = 3.0
    """Robust standard deviations above the median that a spike has at least."""
    ratio: float = 4.0
    """A spike is at least so many times the median."""
    loss_ratio: float = 1.4
    """The same for the loss."""
    parameter_ratio: float = 24.0
    """The gradient of a single parameter is at least so many times the largest value that is remembered of it."""
    window: int = 128
    """How many collected steps are remembered."""
    warmup: int = 64
    """How many values of a series are collected before it is judged by its own level."""
    early: int = 16
    """How many values of a series are collected before it is judged at all."""
    early_ratio: float = 1000.0
    """Before `warmup`, a spike is more than so many times the largest value so far."""

    def needs(self) -> int:
        """Return how many steps must be collected until a series is judged by its own level."""
        return self.warmup + 1


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Tell of an event when it begins: where it was first seen, what moved with it, and what is known of its cause."""
    places, rows = memory.watch(frame, _chosen(options.names))
    told = announced(frame, memory)
    if not places.size:
        return []
    numbers = memory.numbers
    numbers["announced"] = 2.0 if told else numbers.get("announced", 0.0) - 1
    is_announced = numbers["announced"] > 0
    onset, usable, beyond = _look(frame, memory, options, places, rows)
    was_on = numbers.get("calm", CALM) < CALM
    begins = not was_on and bool(onset.jumped.any())
    lasts = begins or (was_on and beyond)
    numbers["calm"] = 0.0 if lasts else min(numbers.get("calm", CALM) + 1, CALM)
    numbers["age"] = 0.0 if begins else numbers.get("age", 0.0) + 1
    if is_announced:
        _move_level(memory, rows[onset.moved], (onset.x - onset.middle)[onset.moved])
    if is_announced or numbers["calm"] >= CALM or numbers["age"] >= HELD:
        _remember(memory, options, rows[usable], onset.x[usable], onset.kinds[usable] == RATES)
    recent = memory.array("recent", width=RECENT, fill=-np.inf)
    recent[rows[usable], int(numbers.get("steps", 0)) % RECENT] = onset.x[usable]
    numbers["steps"] = numbers.get("steps", 0.0) + 1
    return [finding_of(onset, options.severity, told if is_announced else None)] if begins else []


def lasts(memory: Memory) -> bool:
    """Tell whether something is out of the ordinary at this step too."""
    return memory.numbers.get("calm", CALM) == 0


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (
        Selection(("scalar",), (), ("value",), names),
        Selection(("module",), ("output", "grad_input", "grad_output"), ("norm",), names),
        Selection(("module",), ("input",), ("norm",), ("root", "")),
        Selection(("parameter",), ("grad", "update", "value"), ("norm",), names),
    )


def _kind(series: Series) -> float:
    address = series.address
    if address.kind == "scalar":
        return float(RATES if role_of(address.name) == "learning rate" else SCALARS)
    slot = address.slot.split(".")[0]
    return float(
        {"grad": GRADIENTS if address.kind == "parameter" else OTHERS, "value": WEIGHTS, "input": INPUTS}.get(slot, OTHERS)
    )


def _is_loss(series: Series) -> float:
    return float(series.address.kind == "scalar" and role_of(series.address.name) == "loss")


def _look(frame: Frame, memory: Memory, options: Options, places: I64, rows: I64) -> tuple[Onset, Bools, bool]:
    """Return what is out of the ordinary, which series have a number to remember, and whether any is beyond the alarm line."""
    kinds = memory.worked_out("kinds", places, lambda: memory.learned("kind", frame, places, rows, _kind).astype(np.int64))
    limit = memory.worked_out(
        f"limit {in_turns(frame)}",
        places,
        lambda: limits(frame, memory, places, rows, loss=options.loss_ratio, norms=options.ratio),
    )
    size = above_rounding(memory, rows, np.abs(frame.values[places]))
    usable = np.isfinite(size) & (size > 0) & ((limit > 0) | (kinds == RATES))
    x, usable, turn = _changes_of_weights(memory, rows, kinds, np.log(np.where(usable, size, 1.0)), usable)
    u, s, k, n, top = (memory.array(name, fill=np.nan)[rows] for name in (*_TAIL, "top"))
    count = memory.array("count", fill=0)[rows]
    known = usable & (count >= options.warmup) & (kinds != RATES)
    middle = np.where(known, memory.array("middle", fill=0.0)[rows], memory.array("highest", fill=-np.inf)[rows])
    with np.errstate(invalid="ignore"):
        rise = x - middle
        p = np.where(known, log_p(x, u, s, k, n), 0.0)
        few = np.flatnonzero(known & (kinds == SCALARS) & (x - top > np.log(ABOVE)))
        late = (memory.array(name, fill=np.nan)[rows[few]] for name in _LATE_TAIL)
        p[few] = np.minimum(p[few], log_p(x[few], *late) + np.log(2))
    least = np.log(np.maximum(limit, 1.5))
    high = known & (rise > options.z * memory.array("spread", fill=1.0)[rows]) & (rise > least)
    high &= (kinds != WEIGHTS) | (x > np.log(WRITTEN))
    recent = memory.array("recent", width=RECENT, fill=-np.inf)[rows].max(axis=1)
    odd = high & (x > top) & (x - recent > least / 2)
    rare = high & _rare(kinds, known, p)
    rates = (kinds == RATES) & usable & (count >= options.early) & (rise > RISES)
    gradients = (kinds == GRADIENTS) & known
    joint = gradients & odd & (2 * odd[gradients].sum() > gradients.sum()) & _most(gradients, rise, p, ALPHA, options)
    losses = memory.worked_out("losses", places, lambda: memory.learned("loss", frame, places, rows, _is_loss) > 0)
    if joint.any() and (known & losses).any() and not (known & losses & (p < BESIDE)).any():
        joint &= bool(np.median(rise[gradients]) > np.log(ALONE * options.ratio))
    jumped = odd & rare & ((kinds != GRADIENTS) | (x - top > np.log(options.parameter_ratio)))
    jumped |= odd & (kinds == SCALARS) & (p < NEAR) & (x - top > np.log(FAR)) & _most(gradients, rise, p, BESIDE, options)
    norms = (kinds == SCALARS) | (kinds == OTHERS) | (kinds == GRADIENTS)
    early = norms & usable & ~known & (count >= options.early) & (rise > np.log(options.early_ratio))
    jumped |= joint | rates | early
    moved = jumped | (known & (p < MOVED) & (rise > np.minimum(least, np.log(2))))
    usual = memory.array("middle", fill=0.0)[rows]
    rising = np.flatnonzero((kinds == RATES) & usable & (count >= options.warmup) & (x - usual > np.log(RISING))).tolist()
    risen = _rate_in_words(frame, int(places[rising[0]]), float(np.exp(usual[rising[0]]))) if rising and jumped.any() else ""
    onset = Onset(frame, places, kinds, x, middle, np.where(known, top, middle), jumped, moved, known, turn, risen)
    return onset, usable, bool((jumped | rare).any())


def _changes_of_weights(memory: Memory, rows: I64, kinds: I64, x: F64, usable: Bools) -> tuple[F64, Bools, F64]:
    """Put, for weights, by how much the logarithm of the norm changed, on the log scale; return its sign too."""
    weights = kinds == WEIGHTS
    before = memory.array("before", fill=np.nan)
    change = x - before[rows]
    before[rows] = np.where(usable, x, np.nan)
    seen = usable & (~weights | np.isfinite(change))
    size = np.maximum(np.abs(np.where(seen, change, 1.0)), 1e-9)
    return np.where(weights, np.log(size), x), seen, np.sign(change)


def _rate_in_words(frame: Frame, place: int, usual: float) -> str:
    series = frame.table.series[frame.at[place]]
    return f"The learning rate {series} has risen to {frame.values[place]:.4g} from {usual:.4g} in the middle of late"


def _rare(kinds: I64, known: Bools, p: F64) -> Bools:
    """Tell which values are rare by themselves: the smallest of m probabilities is m times as large."""
    several = np.maximum(np.bincount(kinds[known], minlength=RATES + 1), 1)
    several[SCALARS] = 1
    return (p < ALPHA - np.log(several[kinds])) & (kinds != INPUTS) & (kinds != RATES)


def _most(gradients: Bools, rise: F64, p: F64, alpha: float, options: Options) -> bool:
    """Tell whether the gradients of most parameters are out of the ordinary together: twice their median p is a p."""
    if gradients.sum() < SEVERAL:
        return False
    return bool(np.median(rise[gradients]) > np.log(options.ratio) and np.median(p[gradients]) + np.log(2) < alpha)


def _move_level(memory: Memory, rows: I64, rise: F64) -> None:
    """Let what is remembered of series begin at another level."""
    for name in ("ring", "recent", "middle", "highest", "top", "u", "late_u"):
        held = memory.arrays.get(name)
        if held is not None:  # of a series that is new in this step nothing is remembered
            known = rows < len(held)
            held[rows[known]] += rise[known, None] if held.ndim == 2 else rise[known]


def _remember(memory: Memory, options: Options, rows: I64, x: F64, rates: Bools) -> None:
    ring, count = memory.array("ring", width=options.window, fill=np.nan), memory.array("count", fill=0)
    highest = memory.array("highest", fill=-np.inf)
    n, so_far = count[rows], highest[rows]
    u, s, k, seen, largest = (memory.array(name, fill=np.nan)[rows] for name in (*_TAIL, "top"))
    known = (n >= options.warmup) & ~rates
    far = ~known & ~rates & (n >= options.early) & (x - so_far > np.log(options.early_ratio))
    clipped = np.where(known, np.fmin(x, line(ALPHA, u, s, k, seen)), np.where(far, so_far, x))
    ring.reshape(-1)[rows * options.window + n % options.window] = clipped
    highest[rows] = np.maximum(so_far, clipped)
    memory.array("top", fill=np.nan)[rows] = np.fmax(largest, clipped)
    count[rows] = n + 1
    due = rows[(n + 1 >= options.warmup) & (((n + 1) % RENEW == 0) | (n + 1 == options.warmup))]
    if due.size:
        late = (count[due][:, None] - 1 - np.arange(min(LATE, options.window))) % options.window
        _keep_tail(memory, due, np.sort(ring[due[:, None], late], axis=1), _LATE_TAIL)
        _renew(memory, due, ring[due])


def _renew(memory: Memory, rows: I64, values: F64) -> None:
    """Work out median, spread and tail of what is remembered, [n, window]. Changes the values."""
    values.sort(axis=1)  # NaN last
    _keep_tail(memory, rows, values, _TAIL)
    last = np.count_nonzero(values == values, axis=1) - 1
    memory.array("top", fill=np.nan)[rows] = values[np.arange(len(values)), last]
    middle = _of_ordered(values)
    memory.array("middle", fill=0.0)[rows] = middle
    values -= middle[:, None]
    np.abs(values, out=values)
    values.sort(axis=1)
    memory.array("spread", fill=1.0)[rows] = np.maximum(1.4826 * _of_ordered(values), LEAST_SPREAD)


def _keep_tail(memory: Memory, rows: I64, ordered: F64, names: tuple[str, ...]) -> None:
    for name, numbers in zip(names, tail_of(ordered), strict=True):
        memory.array(name, fill=np.nan)[rows] = numbers


def _of_ordered(x: F64) -> F64:
    """Return the median of each ascending row, [n], which NaN may end: `numpy.nanmedian` in a tenth of its time."""
    row, last = np.arange(len(x)), np.count_nonzero(x == x, axis=1) - 1
    return (x[row, last // 2] + x[row, (last + 1) // 2]) / 2
