"""Whether rounding explains that two copies of the same stored numbers differ."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import NumberFormat, coarser

Agreement = Literal["identical", "rounding", "differ"]


@lru_cache(maxsize=256)
def noise_floor(a: NumberFormat, b: NumberFormat) -> float:
    """Return the relative l2 difference that one rounding explains: one unit in the last place of the coarser format.

    Two integer formats have no rounding: 0.
    """
    rough = coarser(a, b)
    return 0.0 if rough.mantissa is None else rough.epsilon


def agreement_of(difference: Difference, floor: float) -> Agreement:
    """Return how far two copies of the same stored numbers agree.

    identical: no bit changed (no value, where the formats differ). rounding: each element on its own is within one unit in the
    last place, so that a single wrong element cannot hide in a norm. floor: `noise_floor` of both formats.
    """
    if difference.changed == 0 and difference.misplaced == 0:
        return "identical"
    return "rounding" if not difference.misplaced and floor and difference.max_ulp <= 1.0 else "differ"
