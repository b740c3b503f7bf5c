"""The loss scale is the same on all ranks.

Relation: ranks that differ only in dp, cp or tp have equal loss scales. Tolerance zero. Looked at before the gradients, whose
replicas come apart by it.
Usually caused by a scaler that looks for overflow on each rank by itself, before the gradients are reduced: what is reduced
then mixes gradients of different scales, and each rank divides by its own.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.relations.shared_scalars import unequal

COST = frozenset({"ranks"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find loss scales that differ between ranks."""
    found = unequal(evidence, "loss_scale", "loss scales")
    return [] if found is None else [found]
