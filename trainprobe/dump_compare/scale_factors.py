"""Values of one side that are those of the other times one number: gradients that were not divided, a scale left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from trainprobe.dump_compare.call_slots import named_values
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.judge import Judged
from trainprobe.engine.core.records import Value

_FAR = 0.02  # relative distance: what is nearer is told as that
_MOST = 10_000  # values that are looked at


def see_factors(judged: Sequence[Judged], a: Side, b: Side) -> None:
    """Give each value that is far apart the number that makes A's to B's, where one does: `Distance.factor`."""
    found = [each for one in judged for each in _far_apart(one)][:_MOST]
    mine = a.columns([left for _, _, left, _ in found]).statistics
    theirs = b.columns([right for _, _, _, right in found]).statistics
    with np.errstate(all="ignore"):
        ratios = np.stack(
            [np.where(mine[name][1] & theirs[name][1], theirs[name][0] / mine[name][0], np.nan) for name in STATISTICS]
        )
    for (one, i, left, _), (norm, *others) in zip(found, ratios.T.tolist(), strict=True):
        value = one.values[i]
        close = 2 * max(value.epsilon, one.own, 1e-4)
        sign = -1.0 if others[0] < 0 else 1.0
        told = [abs(x / (sign * norm) - 1) <= close for x in others[:2]] if norm > 0 else []
        alone = math.prod(left.shape) == 1 and not value.slot.startswith(
            "grad"
        )  # one number is any times another: a whole one?
        whole = max(norm, 1 / norm) if norm > 0 else 0.0
        if told and all(told) and abs(norm - 1) > close and not (alone and abs(whole / round(whole) - 1) > close):
            one.values[i] = value._replace(factor=sign * norm)


def _far_apart(one: Judged) -> Iterator[tuple[Judged, int, Value, Value]]:
    """Yield the values of a call that are far apart: the call, their place in it, and the value of either side."""
    apart = [i for i, value in enumerate(one.values) if _FAR < value.interval.low < math.inf]
    if not apart or one.pair.a is None or one.pair.b is None or one.outcome in ("identical", "rounding"):
        return
    left, right = (dict(zip(*named_values(call), strict=True)) for call in (one.pair.a, one.pair.b))
    for i in apart:
        slot = one.values[i].slot
        if slot in left and slot in right:
            yield one, i, left[slot], right[slot]


def times(value: Distance, gradients: bool = False) -> str:
    """Return how many times as large a value is on one side, in words; a power of two from 32 on as a loss scale.

    gradients: whether the value is a gradient, whatever its slot.
    """
    size, side = (abs(value.factor), "B") if abs(value.factor) >= 1 else (1 / abs(value.factor), "A")
    sign = ", with the other sign" if value.factor < 0 else ""
    power = round(math.log2(size))
    scale = power >= 5 and abs(size / 2**power - 1) < 0.01
    many = str(2**power) if scale else f"{size:.4g}" if size >= 100 else f"{size:.3g}"
    by = f", as by a loss scale of 2^{power}" if scale and (gradients or value.slot.startswith("grad")) else ""
    return f"{'twice' if abs(size - 2) < 0.02 else f'{many} times'} as large in {side}{sign}{by}"
