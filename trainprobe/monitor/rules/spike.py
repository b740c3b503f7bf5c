"""A value far above its own recent level: robust z-score on the log scale.

With x = ln|value| and the last `window` values of the same series,

    z = (x - median) / max(1.4826 · MAD, 0.05)          MAD = median of |x_i - median|

and a spike is z > `z` with value / median > r = `ratio` (`loss_ratio` for the loss, which moves less) that also exceeds each
of the last four values by a factor of sqrt(r), so that a climb, as at the end of a warm-up, is no spike. The gradient of a
single parameter has heavy tails: in 60 healthy trainings of small batches it was seen at 143 times its median and 16 times
the largest of the last 128 values while the loss did not move. It is a spike only above `parameter_ratio` times the largest
value of the window. Before `warmup` values only a jump that needs no statistics is a spike: after `early` values, one of more
than `early_ratio` times the largest value so far. A spike enters the history clipped to the alarm line, so that one bad value
does not poison it and a lasting change of level is learnt. Median and MAD are renewed every eighth value. Spikes less than
eight collected steps apart are one event, reported once, and again when one is four times higher than what was reported.
Where the gradient of a parameter was below a millionth of the largest one, rounding alone had made it (that of a bias before a
normalisation is), and that it is there now is said in these words, unless another series jumped too.

Sources: the modified z-score of Iglewicz and Hoaglin (1993); spike rules of OLMo (6 standard deviations over 128 steps)
and ZClip (Kumar et al., 2025), here with robust estimates.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection
from trainprobe.monitor.limits import above_rounding, in_turns, limits
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at

RENEW = 8  # this and the next are powers of two
RECENT = 4
ESCALATION = 4.0
LEAST_SPREAD = 0.05
ROUNDING = 1e-6  # of the largest gradient of the model in a step


class Options(RuleOptions):
    """Settings of the rule `spike`."""

    z: float = 8.0
    """Robust standard deviations above the median that make a spike."""
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
    """Find the series that jumped in this step; one finding an event, with the largest jump and how many rose with it."""
    places, rows = memory.watch(frame, _chosen(options.names))
    if not places.size:
        return []
    judged, least = memory.worked_out(f"least {in_turns(frame)}", places, lambda: _least(frame, memory, options, places, rows))
    size = above_rounding(memory, rows, np.abs(frame.values[places]))
    usable = np.isfinite(size) & (size > 0) & judged
    x = np.log(size if usable.all() else np.where(usable, size, 1.0))
    count = memory.array("count", fill=0)[rows]
    middle, spread = memory.array("middle", fill=0.0)[rows], memory.array("spread", fill=1.0)[rows]
    rise = x - middle
    z = rise / spread
    known = count >= options.warmup
    jumped = usable & known & (z > options.z) & (rise > least)
    jumped = _above_the_recent(memory, rows, x, least, jumped)
    risen = jumped
    jumped = _above_the_largest(frame, memory, options, places, rows, x, jumped)
    clipped = np.minimum(x, middle + options.z * spread)
    if not known.all():
        highest = memory.array("highest", fill=-np.inf)
        so_far = highest[rows]
        early = usable & ~known & (count >= options.early) & (x - so_far > np.log(options.early_ratio))
        jumped, risen, clipped = jumped | early, risen | early, np.where(known, clipped, np.where(early, so_far, x))
        middle = np.where(known, middle, so_far)
        highest[rows[usable]] = np.maximum(so_far, clipped)[usable]
    if usable.all():
        _remember(memory, options, rows, clipped, x)
    else:
        _remember(memory, options, rows[usable], clipped[usable], x[usable])
    event, some = memory.row("event"), bool(jumped.any())
    begins = memory.newly("event", np.array([event]), np.array([some]), rearm=RENEW)[0]
    if not some:
        return []
    rounding = _was_rounding(frame, places, middle, jumped)
    worst = int(np.argmax(np.where(jumped & ~rounding if (jumped & ~rounding).any() else jumped, x - middle, -np.inf)))
    if not begins and x[worst] - middle[worst] < memory.numbers["height"] + np.log(ESCALATION):
        return []
    memory.numbers["height"] = float(x[worst] - middle[worst])
    robust = float(z[worst]) if known[worst] else None
    usual = float(np.exp(middle[worst]))
    return [_finding(frame, options, int(places[worst]), usual, robust, places[risen], bool(rounding[worst]))]


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (
        Selection(("scalar",), (), ("value",), names),
        Selection(("module",), ("output", "grad_input", "grad_output"), ("norm",), names),
        Selection(("parameter",), ("grad", "update"), ("norm",), names),
    )


def _least(frame: Frame, memory: Memory, options: Options, places: I64, rows: I64) -> tuple[Bools, F64]:
    """Return which series are judged, and by how much each must rise on the log scale, [n]."""
    ratios = limits(frame, memory, places, rows, loss=options.loss_ratio, norms=options.ratio)
    return ratios > 0, np.log(np.maximum(ratios, 1e-9))


def _above_the_largest(frame: Frame, memory: Memory, options: Options, places: I64, rows: I64, x: F64, jumped: Bools) -> Bools:
    """Leave out, of the series that jumped, gradients of parameters that do not exceed what is remembered by far."""
    if not jumped.any():
        return jumped
    out = jumped.copy()
    ring = memory.array("ring", width=options.window, fill=np.nan)
    for i in np.flatnonzero(jumped).tolist():
        address = frame.table.series[frame.at[places[i]]].address
        if address.kind == "parameter" and address.slot == "grad":
            out[i] = x[i] - np.nanmax(ring[rows[i]]) > np.log(options.parameter_ratio)
    return out


def _was_rounding(frame: Frame, places: I64, middle: F64, jumped: Bools) -> Bools:
    """Tell which of the series that jumped are gradients of parameters that were nothing but rounding until now."""
    out = np.zeros(places.size, dtype=bool)
    if not jumped.any():
        return out
    addresses = [frame.table.series[number].address for number in frame.at[places].tolist()]
    gradients = np.array([address.kind == "parameter" and address.slot == "grad" for address in addresses])
    largest = float(np.nanmax(np.where(gradients & np.isfinite(frame.values[places]), frame.values[places], 0.0), initial=0.0))
    return jumped & gradients & (np.exp(middle) < ROUNDING * largest)


def _above_the_recent(memory: Memory, rows: I64, x: F64, least: F64, jumped: Bools) -> Bools:
    """Leave out, of the series that jumped, what has been climbing: what exceeds one of its last four values by too little."""
    if not jumped.any():
        return jumped
    out = jumped.copy()
    recent = memory.array("recent", width=RECENT, fill=-np.inf)[rows[jumped]].max(axis=1)
    out[jumped] = x[jumped] - recent > least[jumped] / 2
    return out


def _remember(memory: Memory, options: Options, rows: I64, clipped: F64, x: F64) -> None:
    ring, recent = memory.array("ring", width=options.window, fill=np.nan), memory.array("recent", width=RECENT, fill=-np.inf)
    count = memory.array("count", fill=0)
    n = count[rows]
    ring.reshape(-1)[rows * options.window + n % options.window] = clipped
    recent.reshape(-1)[rows * RECENT + (n & RECENT - 1)] = x
    n += 1
    count[rows] = n
    due = rows[(n >= options.warmup) & ((n & RENEW - 1 == 0) | (n == options.warmup))]
    if due.size:
        middle, deviation = _median_and_deviation(ring[due])
        memory.array("middle", fill=0.0)[due] = middle
        memory.array("spread", fill=1.0)[due] = np.maximum(1.4826 * deviation, LEAST_SPREAD)


def _median_and_deviation(x: F64) -> tuple[F64, F64]:
    """Return the median of each row that is not NaN alone, and the median distance from it, [n] each. Changes x."""
    x.sort(axis=1)  # NaN last
    middle = _of_ordered(x)
    x -= middle[:, None]
    np.abs(x, out=x)
    x.sort(axis=1)
    return middle, _of_ordered(x)


def _of_ordered(x: F64) -> F64:
    """Return the median of each ascending row, [n], which NaN may end: `numpy.nanmedian` in a tenth of its time."""
    last = x.shape[1] - 1
    if not np.isnan(x[:, -1]).any():
        return (x[:, last // 2] + x[:, (last + 1) // 2]) / 2
    row, last = np.arange(len(x)), np.count_nonzero(x == x, axis=1) - 1
    return (x[row, last // 2] + x[row, (last + 1) // 2]) / 2


def _finding(
    frame: Frame, options: Options, place: int, usual: float, z: float | None, risen: I64, was_rounding: bool
) -> Finding:
    """Return the finding. usual: the median, or the largest value so far where there is no robust z-score yet."""
    series, value = frame.table.series[frame.at[place]], float(frame.values[place])
    compared = f"the largest so far, {usual:.4g}" if z is None else f"its usual {usual:.4g} (robust z = {z:.1f})"
    others = f"; {risen.size - 1} other series jumped with it" if risen.size > 1 else ""
    message = f"{series} jumped to {value:.4g}, {abs(value) / usual:.3g} times {compared}{others}"
    hint = "look at the batch of this step and the one before; a lower peak learning rate or clipping is the usual cure"
    if was_rounding:
        message = (
            f"{series} is {value:.4g}, and rounding alone made it until now ({usual:.2g}): what cancelled it is gone{others}"
        )
        hint = (
            "a bias before a normalisation has no gradient in training mode: see whether the layer behind it went into "
            "evaluation mode (no model.train() after an evaluation), or is given a batch that does not vary"
        )
    return Finding(
        rule="spike",
        severity=options.severity,
        message=message,
        step=frame.step,
        place=frame.place,
        site=series.address.site(),
        measured=value,
        expected=usual,
        names=names_at(frame, risen),
        next=hint,
    )
