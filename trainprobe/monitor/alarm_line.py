"""The line above which the next value of one series is a spike, known before the value comes.

It is the line of the rule `spike` for the loss, for one series alone: what the rule asks of a value, turned into the smallest
value that has it. What all ranks act upon together may be no false alarm on any of them, so that p < α / ranks is asked for.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from trainprobe.monitor.limits import LEAST
from trainprobe.monitor.rules.spike import ABOVE, ALPHA, LATE, LEAST_SPREAD, RECENT, Options
from trainprobe.monitor.tails import line, tail_of


class AlarmLine:
    """See the module text. ratio: a spike is at least so many times the median. ranks: how many look at such a series each.

    usual: the median of what is remembered.
    """

    def __init__(self, ratio: float, ranks: int) -> None:
        self._options, self._ratio, self._ranks = Options(), float(np.log(ratio)), ranks
        self._values = deque[float](maxlen=self._options.window)  # ln |value|
        self.usual = float("nan")
        self.line = float("inf")

    def add(self, value: float, *, spikes: bool = False) -> None:
        """Remember a value. spikes: it was left out, and enters as the line that it is above."""
        if not np.isfinite(value) or not value:
            return
        self._values.append(float(np.log(min(abs(value), self.line) if spikes else abs(value))))
        x = np.sort(np.array(self._values))
        x = np.maximum(x, x[-1] + np.log(LEAST))  # smaller ones are what rounding leaves
        self.usual, self.line = float(np.exp(np.median(x))), float(np.exp(self._limit(x)))

    def _limit(self, x: np.ndarray) -> float:
        """Return the limit of ln |value|. x: what is remembered, ascending."""
        options = self._options
        if len(x) < options.early:
            return float("inf")
        if len(x) < options.warmup:
            return x[-1] + np.log(options.early_ratio)
        middle, alpha = np.median(x), ALPHA - np.log(self._ranks)
        late = np.sort(np.array(self._values)[-LATE:])
        rare = min(
            line(alpha, *tail_of(x[None]))[0],
            max(line(alpha - np.log(2), *tail_of(late[None]))[0], x[-1] + np.log(ABOVE)),
        )
        spread = max(1.4826 * np.median(np.abs(x - middle)), LEAST_SPREAD)
        recent = max(list(self._values)[-RECENT:]) + max(self._ratio, np.log(1.5)) / 2
        return max(rare, middle + options.z * spread, middle + self._ratio, x[-1], recent)
