"""Reduction over the ranks multiplies every gradient by one factor.

Relation: with uᵣ the gradient that backward gives on rank r, summed over the micro-batches, and g the one that is used, before
clipping, ⟨g, w⟩ = c Σᵣ⟨uᵣ, w⟩ for fixed weights w and one factor c over all parameters (1 / ranks for a mean, 1 for a sum; a
loss scale is in it too). The sum is over the ranks that hold the parameter. Judged where ranks differ in dp, cp and pp alone,
and what has one name on several of them is replicated. Floor: 0.05 ‖g‖ and 0.05 of the product, because gradients may travel
in 16 bits.
Usually caused by a parameter that is divided twice or not at all, that is reduced in another group, or whose last micro-batch
comes after its reduction; all ranks agree on the result, so that no comparison of replicas shows it.
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, and_more
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import differs

COST = frozenset({"rerun", "ranks"})
EVERY = 50
STAGE = "reduction"
_FLOOR = 0.05


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that were reduced by a factor of their own."""
    mine = evidence.facts.reductions
    if len(mine) < 3 or len(evidence.peers) < 2 or not evidence.axes <= {"dp", "cp", "pp"}:
        return []
    ratios: dict[str, float] = {}
    totals: dict[str, float] = {}
    for seen in mine:
        key = key_of(seen.name, "arrived")
        group = [peer for peer in along(evidence, evidence.over(seen.name, "grad")) if key in peer.projections]
        if len(group) < sum(key in peer.projections for peer in evidence.peers):
            return []  # ranks hold different tensors under one name: parts, or layers of other stages
        totals[seen.name] = sum(peer.projections[key] for peer in group)
        if abs(seen.used) > _FLOOR * seen.norm and totals[seen.name]:
            ratios[seen.name] = seen.used / totals[seen.name]
    if len(ratios) < 3:
        return []
    factor = float(np.median(list(ratios.values())))
    apart = [
        seen.name
        for seen in mine
        if abs(seen.used - factor * totals[seen.name]) > _FLOOR * (seen.norm + abs(factor * totals[seen.name]))
    ]
    if not apart or 2 * len(apart) > len(mine) or any(differs(evidence, name, "grad") for name in evidence.tensors.names):
        return []  # what differs between replicas is told by `replicas`
    own = ratios.get(apart[0], float("nan")) / factor
    text = (
        f"the gradient of {and_more(apart, len(mine))} is not what the ranks' own gradients make of it: it is {own:.4g} times "
        "what the reduction of the others gives"
    )
    return [
        evidence.finding(
            "reduced_gradients",
            text,
            apart[0],
            "grad",
            measured=own,
            expected=1.0,
            floor=_FLOOR,
            next="reduce every gradient once, over the same group and by the same divisor, after its last micro-batch",
        )
    ]
