"""The loss of each data-parallel rank has the same plain factor.

Relation: the product of the plain numbers by which a rank multiplies its loss right before backward is the same over dp.
Reported where it is a whole number of times that of other ranks, or they of it, and was that at the audited step before.
Other ratios, and those that change from step to step, are weights of uneven batches. Floor: 1e-6. Reported as a warning. A
factor that the autograd graph does not show as the last ones (a criterion that sums where others average) is not seen.
Usually caused by a weight, a debugging line or an accumulation setting that one rank alone has: its data have more weight in
the gradient that the ranks average, and no reduction is at fault.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.gradients import Backwards, LossScales, UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.messages import key_of

COST = frozenset({"ranks"})
OBSERVERS = frozenset({"backward_starts", "gradient_use", "loss_factors", "updates"})
STAGE = "backward"
_FLOOR = 1e-6
_KEY = key_of("loss", "factor")


def check(evidence: Evidence) -> list[Finding]:
    """Find ranks whose loss has another factor than that of the others."""
    group, factors = along(evidence, frozenset({"dp"})), _factors(evidence)
    if len(set(factors.values())) < 2 or factors != evidence.remembered("weighted_ranks", {}):
        return []
    usual = max(Counter(factors.values()).items(), key=lambda pair: (pair[1], -abs(pair[0])))[0]
    others = {rank: factor for rank, factor in factors.items() if factor != usual}
    if not all(_is_multiple(factor, usual) for factor in others.values()):
        return []
    rank, factor = next(iter(others.items()))
    losses = {peer.rank: peer.numbers["loss"] for peer in group}
    like = next(other for other, known in factors.items() if known == usual)
    text = (
        f"the loss of rank {rank} is multiplied by {factor:g} before its backward and that of rank {like} by {usual:g} "
        f"({group_words(evidence, frozenset({'dp'}), group)}; losses {losses[rank]:.4g} and {losses[like]:.4g}). Its data have "
        f"{abs(factor / usual):.3g} times the weight"
    )
    hint = "multiply or divide the loss by the same number on every data-parallel rank"
    return [evidence.found(text, "loss", next=hint, measured=factor, expected=usual, floor=_FLOOR, kind="scalar")]


def shares(evidence: Evidence) -> dict[int, tuple[int, float]]:
    """Return the factor of this rank's loss, where all backward passes of an update have one."""
    factors = {prod(scaled.factors) for scaled in evidence.of(LossScales).scaled}
    known = (
        len(factors) == 1
        and len(evidence.of(LossScales).scaled) == evidence.of(Backwards).count
        and evidence.of(UpdateCounts).once
        and not evidence.of(UsedGradients).closure
    )
    return {_KEY: (1, factors.pop())} if known else {}


def remember(evidence: Evidence) -> dict[int, float]:
    """Return the factors of the ranks."""
    return _factors(evidence)


def _factors(evidence: Evidence) -> dict[int, float]:
    """Return rank → factor over dp; nothing where one does not say."""
    group = along(evidence, frozenset({"dp"}))
    return {peer.rank: peer.rows[_KEY][1] for peer in group} if all(_KEY in peer.rows for peer in group) else {}


def _is_multiple(a: float, b: float) -> bool:
    """Tell whether one of two numbers is a whole number of times the other."""
    low, high = sorted((abs(a), abs(b)))
    return low > 0 and round(high / low) >= 2 and abs(high / low - round(high / low)) <= _FLOOR * high / low
