"""The largest jump of the loss, in words, where nothing was found: a needle in a curve is told of, with why it is no spike."""

from __future__ import annotations

import numpy as np

from trainprobe.monitor.report.run_view import Curve
from trainprobe.monitor.rules.spike import ALPHA, Options
from trainprobe.monitor.tails import log_p, tail_of

_SETTLES = 8  # values, from which there is a median to speak of


def largest_jump(name: str, curve: Curve) -> str:
    """Return the sentence on the value that is farthest above the median of those before it; "" where none stands out."""
    steps, values = np.asarray(curve[0]), np.asarray(curve[1], dtype=np.float64)
    good = np.isfinite(values) & (values > 0)
    steps, x = steps[good], np.log(values[good])
    options = Options()
    if x.size <= _SETTLES or (values < 0).any():
        return ""
    before = np.lib.stride_tricks.sliding_window_view(np.concatenate([np.full(options.window, np.nan), x[:-1]]), options.window)
    rise = np.full(x.size, -np.inf)
    rise[_SETTLES:] = x[_SETTLES:] - np.nanmedian(before[_SETTLES:], axis=1)
    at = int(np.argmax(rise))
    times = float(np.exp(rise[at]))
    if times < options.loss_ratio:
        return ""
    known = before[at][np.isfinite(before[at])]
    why = f"only {known.size} steps came before it, and {options.warmup} are needed"
    if known.size >= options.warmup:
        p = float(np.exp(log_p(x[at : at + 1], *tail_of(np.sort(known)[None]))[0]))
        why = "it rose over several steps, or a setting or the level had just changed"
        if p > np.exp(ALPHA):
            why = f"by the noise of the {known.size} steps before, one step in {max(1 / p, 1):,.0f} is so high"
    return f"Largest jump of {name}: step {int(steps[at])}, {times:.3g} times its median; not called a spike because {why}"
