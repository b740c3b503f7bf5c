"""A value above its running mean: the rule that mindstudio-probe calls AnomalyTurbulence.

With h0 = |x0| and h ← 0.99·h + 0.01·|x|, a value deviates when |x| > h·(1 + `threshold`), h taken before the value enters; with
`both` also when |x| < h / (1 + `threshold`). Unlike there a value that is absent,
NaN or infinite neither fires nor enters h, a zero history does not fire, nothing is judged before `warmup` values, a series
fires once until it has been in order again, and h survives a restart. It judges only where a plan names it.

Source: exponentially weighted moving average control (Roberts, 1959).
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import Frame, Selection
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at


class Options(RuleOptions):
    """Settings of the rule `mean_deviation`."""

    threshold: float = 99.0
    """By which share of the running mean a value may exceed it."""
    statistics: Patterns = ("norm",)
    """Which statistics are judged: norm, absmax, mean, and value for scalars. A mean of signed numbers is noise around
    zero in most layers and deviates without end."""
    both: bool = False
    """Judge values that fall short of the running mean too."""
    warmup: int = 20
    """How many values of a series pass before it is judged."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.warmup + 1


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find values that deviate from their running mean; one finding a step, with the largest."""
    places, rows = memory.watch(frame, [Selection((), (), options.statistics, options.names)])
    size = np.abs(frame.values[places])
    usable = np.isfinite(size)
    places, rows, size = places[usable], rows[usable], size[usable]
    mean, count = memory.array("mean", fill=0.0), memory.array("count", fill=0)
    h, judged = mean[rows], count[rows] >= options.warmup
    limit = 1 + options.threshold
    off = judged & (h > 0) & ((size > h * limit) | (options.both & (size < h / limit)))
    mean[rows] = np.where(count[rows] == 0, size, 0.99 * h + 0.01 * size)
    count[rows] += 1
    begins = memory.newly("off", rows, off)
    if not begins.any():
        return []
    with np.errstate(all="ignore"):
        distance = np.abs(np.log(size / h))
    worst = int(np.argmax(np.where(begins, distance, -1.0)))
    series = frame.table.series[frame.at[places[worst]]]
    others = f"; {int(begins.sum()) - 1} other series deviate too" if begins.sum() > 1 else ""
    return [
        options.found(
            frame,
            f"{series} is {size[worst]:.4g}, its running mean {h[worst]:.4g}{others}",
            series.address.site(),
            measured=float(size[worst]),
            expected=float(h[worst]),
            names=names_at(frame, places[begins]),
            next="look at this value on the page that `trainprobe report {output}` writes",
        )
    ]
