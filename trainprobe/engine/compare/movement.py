"""Whether weights have moved alike in two trainings: how far apart their statistics are, of how far they have moved.

A learning rate, a schedule or a formula of the optimizer changes how far all weights move, and rounding changes that little. A
single weight may move otherwise in healthy trainings: where its gradient is nothing but rounding, Adam makes whole steps of it.
So the median over weights tells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median

MOVED_ALIKE = 1e-2  # a median over weights that rounding explains, for each step since they were equal
_FAR = 0.5  # of one weight: more than the part of it whose gradient is rounding makes in healthy trainings, where 0.4 was seen
_ROUNDED = 1e-6  # relative: what float32 leaves of a statistic that did not move
Numbers = Mapping[str, float]  # statistic → of one weight


def shares(weights: Iterable[tuple[str, Numbers, Numbers, Numbers, Numbers]]) -> dict[str, float]:
    """Return weight → how far A and B are apart, of the farther of their two movements: 0 to 2, a median over its statistics.

    weights: name, statistics of A and of B before, and behind. Weights that have not moved are left out.
    """
    found: dict[str, float] = {}
    for name, a0, b0, a, b in weights:
        known = a0.keys() & b0.keys() & a.keys() & b.keys()
        if any(a0[key] != a[key] or b0[key] != b[key] for key in known):
            found[name] = median(_share(a0[key], b0[key], a[key], b[key]) for key in known)
    return found


def moved_otherwise(found: Mapping[str, float], steps: int, sure: Collection[str] = ()) -> tuple[list[str], float] | None:
    """Return the weights that have moved otherwise, and the share of the first; None where most have moved alike.

    found: what `shares` returns. steps: of the optimizer since the weights were equal. sure: weights of which the gradients are
    known to agree; where several of these are far apart, they have moved otherwise though most have not.
    """
    middle = median(found.values()) if found else 0.0
    if middle > MOVED_ALIKE * steps:
        names = [name for name, share in found.items() if share > MOVED_ALIKE * steps]
    else:
        names = [name for name, share in found.items() if share > _FAR and name in sure]
    return (names, found[names[0]]) if names and (middle > MOVED_ALIKE * steps or len(names) > 1) else None


def _share(a0: float, b0: float, a: float, b: float) -> float:
    """Return how far one statistic is apart; 2, the most, of what is not finite."""
    moved, apart = max(abs(a - a0), abs(b - b0)), abs(a - b)
    if apart <= _ROUNDED * max(abs(a), abs(b)):
        return 0.0
    return min(apart / moved, 2.0) if moved > 0 else 2.0
