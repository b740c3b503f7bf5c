"""The gradient that an update uses has the precision with which the backward pass left it.

Relation, of up to eight parameters of float32, the largest, and a sample of each: the update does not use what the last
backward pass of a step left, rounded to a format of 16 bits that does not hold it, at two audited steps in a row. Compared
before gradients are clipped; tolerance none, as all elements of a sample must be equal to their rounding. Gradients that
backward passes leave with fewer bits (under autocast, or behind a hook that compresses them) violate nothing. Reported as a
warning.
Usually caused by a loop that exchanges, stores or scales gradients in 16 bits and converts them back.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"gradient_precision"})
STAGE = "clipping"
PYTORCH_ONLY = "what a backward pass left is set against what the update uses by torch"


@dataclass(frozen=True, slots=True)
class GradientPrecision:
    """Parameters whose gradient was rounded between the last backward pass and the update."""

    rounded: tuple[tuple[str, str], ...] = ()
    """Each with the format."""
    looked_at: int = 0
    """How many were looked at."""


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that were rounded, as at the audited step before."""
    now, before = evidence.of(GradientPrecision), evidence.before
    if before is None or not before.of(GradientPrecision).rounded or 2 * len(now.rounded) <= now.looked_at:
        return []
    names, dtype = [name for name, _ in now.rounded], now.rounded[0][1]
    text = f"the gradient of {and_more(names, now.looked_at)} was rounded to {dtype} between the backward pass and the update"
    hint = "keep gradients in float32 from the backward pass to the update"
    return [evidence.found(text, names, "grad", next=hint, measured=dtype, expected="float32")]
