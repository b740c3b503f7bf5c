"""A reported loss, gradient norm or scalar with a gradient changes while the weights change.

Relation: no such scalar has bitwise the same value at six or more audited steps in a row at which the weights changed. It is
called a loss or a gradient norm, or was noted as a tensor with a gradient, so that it depends on the weights. Zero, infinity
and NaN are left out (a hinge loss may stay at 0). So are scalars of other names that changed before (a temperature may reach
its limit), and a norm that equals the clipping limit. Tolerance none: two updates do not agree in all bits by chance. Reported
as a warning.
Usually caused by a report of a value that was taken once (a closure over an old batch, a cached or detached result, a variable
that is no longer assigned), by a loss that does not depend on the batch, or by a quotient of equal things (a policy's ratio is
always 1 if its old log-probabilities are computed anew at each step). A training that reports what it computes cannot violate
this.
"""

from __future__ import annotations

import math

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import ClippedGradients
from trainprobe.monitor.scalar_names import role_of

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"clips", "noted_scalars", "updates"})
STAGE = "backward"
_LOOKS = 6
_BEGINS = 2  # steps from which on what is neither a loss nor a norm must have stood still: others may come to a limit


def check(evidence: Evidence) -> list[Finding]:
    """Find the first scalar that stands still."""
    limits = {clip.limit for clip in evidence.of(ClippedGradients).clips}
    for name, value in evidence.scalars.items():
        streak = evidence.streak("scalar", name)
        if (
            streak is None
            or (role_of(name) is None and streak.since > _BEGINS)
            or streak.count < _LOOKS
            or value == 0
            or not math.isfinite(value)
            or not _moves(evidence)
        ):
            continue
        if role_of(name) == "gradient norm" and any(math.isclose(value, limit, rel_tol=1e-5) for limit in limits):
            continue
        text = (
            f"the reported {name} was {value:.9g}, the same to the bit, at {streak.count} audited steps in a row, over "
            f"{evidence.ordinal - streak.since} steps, while the weights moved"
        )
        hint = "report the value that this step computed; look for a variable that is assigned once, or a cached batch"
        if role_of(name) is None:
            text += ", on which it depends"
            hint = "look at what it is computed from: two operands that are the same tensor, or an old value that is used again"
        return [evidence.found(text, name, next=hint, measured=value, expected="another value at each step", kind="scalar")]
    return []


def _moves(evidence: Evidence) -> bool:
    """Tell whether this update changed any weight."""
    seen = evidence.tensors
    return any(seen.checksum(name, "value") != seen.checksum(name, "value_after") for name in seen.with_slot("value_after"))
