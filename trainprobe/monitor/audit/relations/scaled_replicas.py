"""Clipping leaves replicas bit-equal.

Relation: gradients of replicated parameters that were equal before clipping, or that differ by one factor throughout, are
equal after it. Tolerance zero. What differs otherwise is reported by `replicas`.
Usually caused by clipping on some ranks only (DeepSpeed issue 1801), or by a coefficient that comes from each rank's own norm.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, group_words
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import beyond_one_factor, differs, group_of, minority_ranks

COST = frozenset({"fingerprints", "ranks"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "clipping"


def check(evidence: Evidence) -> list[Finding]:
    """Find replicated gradients that came apart in clipping."""
    if len(evidence.peers) < 2:
        return []
    names = [name for name in evidence.tensors.with_slot("grad") if evidence.over(name, "grad")]
    differing = [name for name in names if differs(evidence, name, "grad")]
    if not differing or beyond_one_factor(evidence, differing) != [] or any(differs(evidence, name, "value") for name in names):
        return []
    first = differing[0]
    group, key = group_of(evidence, first, "grad"), key_of(first, "grad")
    norms = [peer.rows[key][1] for peer in group]
    factor = max(norms) / min(norms) if min(norms) > 0 else float("inf")
    minority, listed_norms = minority_ranks(group, key)
    text = (
        "the gradients that the optimizer uses differ in the "
        f"{group_words(evidence, evidence.over(first, 'grad'), group)} by the factor "
        f"{factor:.6g}: {and_more(differing, len(evidence.tensors.names))}, ranks {minority}. Norms: "
        f"{listed_norms}. Clipping did it: its "
        "coefficient was not the same on all ranks"
    )
    hint = "clip on every rank, by one norm that is taken over all of them"
    return [
        evidence.found(
            text, first, "grad", next=hint, measured=factor, expected=1.0, floor=0.0, severity="error", names=differing
        )
    ]
