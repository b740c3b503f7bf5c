"""Replicas that entered an update bit-equal leave it bit-equal.

Relation: where weight, state and gradient of a replicated parameter are equal before the update, the weight is equal after
it. Copies of one piece on several ranks (hybrid sharding) are replicas as well. Tolerance zero.
Usually caused by a learning rate, weight decay or step counter that differs between ranks, by an optimizer kernel that
depends on the layout, or by a step that one rank skipped.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, group_words
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import copied_over, differs, group_of, minority_ranks

COST = frozenset({"fingerprints", "ranks"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "update"


def check(evidence: Evidence) -> list[Finding]:
    """Find replicas that came apart in the update."""
    if len(evidence.peers) < 2:
        return []
    seen = evidence.tensors
    names = [name for name in seen.with_slot("value_after") if copied_over(evidence, name, "value_after")]
    names = [name for name in names if name not in evidence.history.handed_over]  # one rank steps it, and hands it over later
    differing = [name for name in names if differs(evidence, name, "value_after")]
    before = [slot for slot in {slot for _, slot in seen.rows} if not slot.endswith("_after")]
    if not differing or any((name, slot) in seen and differs(evidence, name, slot) for name in differing for slot in before):
        return []
    first = differing[0]
    group, key = group_of(evidence, first, "value_after"), key_of(first, "value_after")
    minority, norms = minority_ranks(group, key)
    where = group_words(evidence, copied_over(evidence, first, "value_after"), group)
    text = (
        f"the weights differ after the update in the {where}: {and_more(differing, len(names))}, ranks {minority}. "
        f"Before it weights, optimizer state and gradients were equal. Norms: {norms}"
    )
    hint = "compare learning rates, weight decay and step counters of the ranks"
    return [
        evidence.found(
            text,
            first,
            "value",
            next=hint,
            measured="different",
            expected="equal",
            floor=0.0,
            severity="error",
            names=differing,
        )
    ]
