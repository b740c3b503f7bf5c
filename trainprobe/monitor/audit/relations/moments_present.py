"""Moments are not empty once a parameter has been stepped.

Relation: where the step counters are above one, the running averages of most parameters are not all zeros (some engines step
once without a gradient when they start). Tolerance none; single parameters may have had no gradient so far, so that at least
half of those with a gradient must be empty, and two; what an audited update has left empty (the first matrix of an adapter,
whose second begins with zeros) was not lost. Usually caused by a resume that restored the counters and not the
moments: the first updates are then far too large or too small.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "state"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def check(evidence: Evidence) -> list[Finding]:
    """Find moments that are empty although steps were taken."""
    seen = evidence.tensors
    for slot in MOMENTS:
        stepped = [
            name
            for name in seen.with_slot(slot)
            if seen.number(name, "step", "mean") > 1 and (name, "grad") in seen and seen.number(name, "grad", "norm") > 0
        ]
        empty = [name for name in stepped if seen.number(name, slot, "norm") == 0 and not _was_empty(evidence, name, slot)]
        if len(empty) >= max(2, 0.5 * len(stepped)):
            count = seen.number(empty[0], "step", "mean")
            text = (
                f"the moments {slot} of {and_more(empty, len(stepped))} are empty while its step counter "
                f"is {count:g}: they were lost, probably on resume"
            )
            hint = "load the optimizer's whole state, or reset its step counters too"
            return [evidence.found(text, empty, slot, next=hint, measured=0.0, expected="not empty", severity="error")]
    return []


def _was_empty(evidence: Evidence, name: str, slot: str) -> bool:
    before = evidence.before
    return before is not None and before.tensors.number(name, f"{slot}_after", "norm") == 0
