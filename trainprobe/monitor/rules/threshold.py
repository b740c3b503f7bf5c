"""A value outside fixed limits: the rule that mindstudio-probe calls AnomalyNan with a threshold.

Judges |x| > `limit`, and x outside [`low`, `high`] where these are given, for the chosen statistics. A series fires once
until it has been inside again. Values that are not finite are the business of the rule `nonfinite`, except that an infinity
is above any limit. Absent values do not fire. It judges only where a plan names it, because limits are the user's to say.
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import Frame, Selection
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at


class Options(RuleOptions):
    """Settings of the rule `threshold`."""

    limit: float | None = 1e10
    """Largest magnitude that is in order."""
    low: float | None = None
    """Smallest value that is in order."""
    high: float | None = None
    """Largest value that is in order."""
    statistics: Patterns = ("norm", "value")
    """Which statistics are judged: norm, absmax, mean, zero_share, and value for scalars."""
    slots: Patterns = ()
    """Which slots are judged, such as output, grad, value; empty: all."""


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find values outside the limits; one finding a step, with the first and how many."""
    places, rows = memory.watch(frame, [Selection((), options.slots, options.statistics, options.names)])
    x = frame.values[places]
    out = np.zeros(x.shape, dtype=bool)
    if options.limit is not None:
        out |= np.abs(x) > options.limit
    if options.low is not None:
        out |= x < options.low
    if options.high is not None:
        out |= x > options.high
    begins = memory.newly("out", rows, out)
    if not begins.any():
        return []
    first = int(np.flatnonzero(begins)[0])
    series = frame.table.series[frame.at[places[first]]]
    others = f"; {int(begins.sum()) - 1} other series too" if begins.sum() > 1 else ""
    limits = [f"magnitude up to {options.limit:g}"] if options.limit is not None else []
    limits += [f"at least {options.low:g}"] if options.low is not None else []
    limits += [f"at most {options.high:g}"] if options.high is not None else []
    return [
        options.found(
            frame,
            f"{series} is {x[first]:.6g}, outside its limits{others}",
            series.address.site(),
            measured=float(x[first]),
            expected=", ".join(limits),
            names=names_at(frame, places[begins]),
            next="look at this value on the page that `trainprobe report {output}` writes, or widen the limits",
        )
    ]
