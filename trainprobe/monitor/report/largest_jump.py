"""The largest jump of the loss, in words, where nothing was found: a needle in a curve is told of, with why it is no spike."""

from __future__ import annotations

import numpy as np

from trainprobe.monitor.frames import F64
from trainprobe.monitor.report.run_view import Curve
from trainprobe.monitor.rules.spike import ALPHA, LEAST_SPREAD, RECENT, Options
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
    known = np.sort(before[at][np.isfinite(before[at])])
    why = _why_no_spike(x, at, known, options)
    return f"Largest jump of {name}: step {int(steps[at])}, {times:.3g} times its median; not called a spike because {why}"


def _why_no_spike(x: F64, at: int, known: F64, options: Options) -> str:
    """Return which condition of the rule `spike` does not hold at a place. known: ascending, what the rule remembers there."""
    if known.size < options.warmup:
        return f"only {known.size} steps came before it, and {options.warmup} are needed"
    p = float(np.exp(log_p(x[at : at + 1], *tail_of(known[None]))[0]))
    if p > np.exp(ALPHA):
        return f"by the noise of the {known.size} steps before, one step in {max(1 / p, 1):,.0f} is so high"
    least, middle = max(options.loss_ratio, 1.5), float(np.median(known))
    if x[at] - middle <= np.log(least):
        return f"a spike is at least {least:g} times the median"
    spread = max(1.4826 * float(np.median(np.abs(known - middle))), LEAST_SPREAD)
    if x[at] - middle <= options.z * spread:
        return f"it is {(x[at] - middle) / spread:.2g} robust standard deviations above it, and a spike is {options.z:g}"
    if x[at] <= known[-1]:
        return f"the loss was as high within the {known.size} steps before"
    if x[at] - x[max(0, at - RECENT) : at].max() <= np.log(least) / 2:
        return f"the loss had risen over the {RECENT} steps before"
    return "a change that was told of, or a noted change of a setting, was still under way"
