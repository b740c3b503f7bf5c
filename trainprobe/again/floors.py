"""The floor of a value: what rounding alone does to it, as a run that is rounded otherwise shows it; and the verdict.

Each condition measures floors in its own way, and tells in floors how far the values of its second run are from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainprobe.comparison.verdict import Verdict

MARGIN = 16  # floors that are rounding still


def verdict_of(floors: Sequence[float], first: Callable[[], str], about: str = "") -> Verdict:
    """Return what two runs come to.

    floors: how many of them each value is apart, 0 where it has the same bits, infinity where no rounding reaches it. first:
    says where the runs first differ. about: further words on the values.
    """
    equal, count, worst = sum(not x for x in floors), len(floors), max(floors)
    if worst > MARGIN:
        far = sum(x > MARGIN for x in floors)
        many = f"{far} of {count} values are beyond {MARGIN} times the floor, {equal} have the same bits"
        return Verdict(2, f"not the same: {first()}", [many])
    if equal == count:
        return Verdict(0, f"identical: all {count} values have the same bits{about}")
    text = f"{equal} of {count} values have the same bits, the others are within {worst:.2g} floors"
    return Verdict(1, f"equal within rounding: {text}{about}")


def nudged(t: torch.Tensor, units: float) -> torch.Tensor:
    """Return a tensor in float64, each element moved up or down, by chance, by so many units of its last place."""
    signs = torch.randint(0, 2, t.shape, generator=torch.Generator().manual_seed(0)).to(t.device) * 2 - 1
    return t.double() * (1 + signs * units * torch.finfo(t.dtype).eps)
