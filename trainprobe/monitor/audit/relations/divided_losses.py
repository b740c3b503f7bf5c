"""The loss of each micro-batch is divided by their number, once.

Relation, for steps of n ≥ 2 backward passes whose losses all have the same plain factors 1/d right before backward: n is not
twice among these divisors d, one division upon the other, unless what they divide is a sum of several terms. And where
n was the divisor at an audited step before, a step of another number of passes does not have that divisor still. Floor: 1e-6
of the divisor. Reported as a warning. What is divided by tokens, or by nothing, is not judged. A factor undoes its inverse.
Usually caused by a loop that divides the loss and hands it to an engine that divides too (DeepSpeed, Accelerate, Lightning),
which makes the gradient n times too small; and by the last, incomplete group of micro-batches of an epoch, whose update is
smaller than that of all others by its share.
"""

from __future__ import annotations

from itertools import pairwise

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import Backwards, LossScales, UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"host"})
OBSERVERS = frozenset({"backward_starts", "gradient_use", "loss_factors", "updates"})
STAGE = "backward"
_FLOOR = 1e-6


def check(evidence: Evidence) -> list[Finding]:
    """Find losses of micro-batches that are divided twice, or by another number than there are."""
    divisors, passes = divisors_of(evidence), evidence.of(Backwards).count
    if not divisors:
        return []
    if passes >= 2 and _twice(divisors, passes) and not any(s.of_sum for s in evidence.of(LossScales).scaled):
        text = (
            f"the loss of each of {passes} micro-batches was divided by {passes} twice before backward: the gradient is "
            f"{passes} times too small"
        )
        hint = "leave the division to the engine that drives the backward pass, or to the loop, but not to both"
        return [_finding(evidence, text, float(passes**2), float(passes), hint)]
    usual = _known(evidence)
    if usual >= 2 and passes != usual and usual in divisors and passes not in divisors:
        text = (
            f"the loss of each of {passes} micro-batches was divided by {usual}, as at steps of {usual} micro-batches. This "
            f"update has {passes / usual:.3g} of the size of a mean over its micro-batches"
        )
        hint = "divide by the number of micro-batches in this step, or leave out the last incomplete group of an epoch"
        return [_finding(evidence, text, float(usual), float(passes), hint)]
    return []


def divisors_of(evidence: Evidence) -> tuple[int, ...]:
    """Return the whole numbers above 1 by which every backward pass of an update had its loss divided, the last first."""
    gradients = evidence.of(UsedGradients)
    scaled = evidence.of(LossScales).scaled
    if (
        not scaled
        or len(scaled) != evidence.of(Backwards).count
        or gradients.closure
        or gradients.discarded
        or not evidence.of(UpdateCounts).once
    ):
        return ()
    if any(other.factors != scaled[0].factors for other in scaled):
        return ()
    factors = scaled[0].factors
    divisors = [1 / factor for factor in factors if 0 < factor < 1 and not _undone(factor, factors)]
    return tuple(round(d) for d in divisors if round(d) >= 2 and abs(d - round(d)) <= _FLOOR * d)


def _undone(factor: float, factors: tuple[float, ...]) -> bool:
    """Tell whether another factor takes this one back, as loops do before an engine that divides."""
    return any(abs(factor * other - 1) <= _FLOOR for other in factors)


def remember(evidence: Evidence) -> int:
    """Return how many micro-batches a step had that were divided by their number, as last seen; 0 where none was."""
    passes = evidence.of(Backwards).count
    return passes if passes >= 2 and passes in divisors_of(evidence) else _known(evidence)


def _known(evidence: Evidence) -> int:
    return evidence.remembered("divided_losses", 0)


def _twice(divisors: tuple[int, ...], passes: int) -> bool:
    return any(pair == (passes, passes) for pair in pairwise(divisors))


def _finding(evidence: Evidence, text: str, measured: float, expected: float, hint: str) -> Finding:
    return evidence.found(text, "loss", next=hint, measured=measured, expected=expected, floor=_FLOOR, kind="scalar")
