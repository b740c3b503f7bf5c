"""From a measured difference and its noise floor to one word.

* identical: no bit changed (no value, when the formats differ).
* rounding: explained by storing or summing the same numbers in another order or format.
* suspicious: above the floor, yet within ten times of it: look.
* bug: more than rounding can explain.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import NumberFormat, coarser

Verdict = Literal["identical", "rounding", "suspicious", "bug"]
VERDICTS: tuple[Verdict, ...] = ("identical", "rounding", "suspicious", "bug")
SUSPICIOUS = 10.0  # times the floor; below it a longer reduction than assumed may be the cause


@lru_cache(maxsize=256)
def noise_floor(a: NumberFormat, b: NumberFormat, reduction: int = 1) -> float:
    """Return the relative l2 difference that rounding alone explains.

    One rounding is off by at most one unit in the last place of the coarser format, ε relative. A sum of `reduction` terms in
    another order wanders as a random walk, ε·√reduction (Higham 2002, Accuracy and Stability of Numerical Algorithms, §2.8 and
    §4.2). Two integer formats have no rounding: 0.
    """
    rough = coarser(a, b)
    return 0.0 if rough.mantissa is None else rough.epsilon * math.sqrt(max(1, reduction))


def judge(difference: Difference, floor: float, *, stored: bool = False) -> Verdict:
    """Return the verdict on one difference.

    stored: the two sides claim to be the same stored numbers, so each element on its own must be within one unit in the last
    place (a single wrong element cannot hide in a norm); otherwise the relative l2 is held against the floor.
    """
    if difference.changed == 0 and difference.misplaced == 0:
        return "identical"
    if difference.misplaced or not math.isfinite(difference.relative_l2):
        return "bug"
    if stored:
        return "rounding" if floor and difference.max_ulp <= 1.0 else "bug"
    if difference.relative_l2 <= floor:
        return "rounding"
    return "suspicious" if difference.relative_l2 <= SUSPICIOUS * floor else "bug"


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the gravest of several verdicts; of none, identical."""
    return VERDICTS[max((VERDICTS.index(v) for v in verdicts), default=0)]
