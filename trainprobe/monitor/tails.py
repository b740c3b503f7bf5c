"""How rare a value is compared with the recent values of its series: the tail of its excess over a high threshold.

With u the k-th largest of the last n logarithms and s the mean excess of the k above it (Hill's estimate), a new value x has

    p = k/n · (1 + (x - u) / (k s))^-k

This is exact for exponential excesses, because (x - u) / s then has the F distribution with 2 and 2k degrees of freedom. On the
log scale these are tails that fall with any power; s is the inverse of the power. For lighter tails p is too large, so that the
rate of false alarms is at most the requested p, whatever the noise of a training is like. Steps need not be independent; the
caller must exclude a level that climbs.

For the series of one step, whatever their dependence, twice the median of their p is a p too (Rüger, 1978), and so is m times
the smallest of m (Bonferroni).

Sources: Hill (1975); peaks over threshold for streams (Siffer et al., 2017, SPOT), with the uncertainty of s added.
"""

from __future__ import annotations

import numpy as np

from trainprobe.monitor.frames import F64

LEAST_EXCESS = 0.02  # 2 %: a series that never moved has no scale of its own
_MOST = 16


def tail_of(ordered: F64) -> tuple[F64, F64, F64, F64]:
    """Return u, s, k and n of each ascending row, [n] each, which NaN may end."""
    n = np.count_nonzero(ordered == ordered, axis=1)
    k = np.clip(np.minimum(np.maximum(n // 4, 8), n - 1), 1, _MOST)
    row = np.arange(len(ordered))
    u = ordered[row, n - 1 - k]
    places = n[:, None] - 1 - np.arange(_MOST)
    above = np.where(np.arange(_MOST) < k[:, None], ordered[row[:, None], np.maximum(places, 0)] - u[:, None], 0.0)
    return u, np.maximum(above.sum(axis=1) / k, LEAST_EXCESS), k.astype(np.float64), n.astype(np.float64)


def log_p(x: F64, u: F64, s: F64, k: F64, n: F64) -> F64:
    """Return ln p of values; 0 for one that is not above the threshold."""
    excess = np.maximum(x - u, 0.0)
    return np.where(excess > 0, np.log(k / n) - k * np.log1p(excess / (k * s)), 0.0)


def line(log_of_p: float, u: F64, s: F64, k: F64, n: F64) -> F64:
    """Return the value that has this ln p."""
    return u + k * s * np.expm1((np.log(k / n) - log_of_p) / k)
