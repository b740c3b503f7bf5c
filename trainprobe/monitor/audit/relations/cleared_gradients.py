"""Gradients are empty before the first backward pass of a step.

Relation: when backward begins, no parameter holds the gradient that the optimizer has used already. Tolerance none: the
gradient that is found is bit-equal to the one that was used, or, where the step before was not audited, it is there although
every audited step updates. Usually caused by a missing `zero_grad`, or by one that is called on another model or optimizer.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more

COST = frozenset({"fingerprints"})
EVERY = 10
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that the optimizer has used already."""
    left, before = evidence.facts.left, evidence.before
    if not left or before is None or not (before.facts.updates and evidence.facts.updates):
        return []
    if evidence.follows:
        left = {name: seen for name, seen in left.items() if before.tensors.checksum(name, "grad") == seen[0]}
    if not left:
        return []
    names = list(left)
    text = (
        f"gradients are not empty before backward: {and_more(names, len(evidence.model.parameters))} "
        "still holds what the optimizer has used "
        f"(norm {left[names[0]][1]:.6g}), and this step's gradient is added to it"
    )
    return [
        evidence.finding(
            "cleared_gradients",
            text,
            names[0],
            "grad",
            measured=left[names[0]][1],
            expected=0.0,
            next="call optimizer.zero_grad() once for every optimizer step",
        )
    ]
