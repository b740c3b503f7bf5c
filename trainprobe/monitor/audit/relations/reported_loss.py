"""The reported loss is the one whose gradient is taken.

Relation: with n backward passes in a step, one for each call of the model, and ℓᵢ the numbers that they begin from, divided by
the loss scale, Σℓᵢ is not n times the reported loss; where it is, the gradient is that of the sum over the micro-batches and
the report that of their mean. Floor: 1e-4 of Σℓᵢ. On as many data-parallel ranks as there are micro-batches nothing is judged,
because either may be the factor.
Usually caused by gradient accumulation without a division: the gradient is n times too large, which Adam hides and clipping
or SGD does not.
"""

from __future__ import annotations

import math

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host", "ranks"})
EVERY = 10
STAGE = "backward"
_FLOOR = 1e-4


def check(evidence: Evidence) -> list[Finding]:
    """Find a loss that was summed over the micro-batches and reported as their mean."""
    facts, reported = evidence.facts, scalar(evidence.scalars, "loss")
    losses, group = facts.differentiated, along(evidence, frozenset({"dp", "cp"}))
    n = len(losses)
    if n < 2 or n != len(facts.batches) or not facts.updates or reported is None or not math.isfinite(reported):
        return []
    if evidence.place.world_size % n == 0:
        return []
    told = [peer.numbers["differentiated"] for peer in group] or [differentiated(evidence)]
    totals = (differentiated(evidence), sum(told) / len(told))
    if not any(abs(total - n * reported) <= _FLOOR * abs(total) and total for total in totals):
        return []
    text = (
        f"the {n} losses that were differentiated add up to {totals[0]:.6g}, {n} times the reported loss {reported:.6g}: the "
        "gradient is summed over the micro-batches and not averaged"
    )
    return [
        evidence.finding(
            "reported_loss",
            text,
            "loss",
            measured=totals[0],
            expected=reported,
            floor=_FLOOR,
            kind="scalar",
            severity="warning",
            next="divide the loss of each micro-batch by their number before backward",
        )
    ]


def differentiated(evidence: Evidence) -> float:
    """Return the sum of what backward passes of this rank began from, without the loss scale; NaN where that is not known."""
    losses = evidence.facts.differentiated
    return sum(losses) / (scalar(evidence.scalars, "loss scale") or 1.0) if losses else float("nan")
