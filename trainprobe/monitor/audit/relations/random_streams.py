"""Tensor-parallel ranks draw the same random numbers outside their own regions.

Relation: ranks of a tp group whose random states were equal at the audited step before have equal ones now, where the forward
pass draws. Tolerance none.
Usually caused by a rank that drew a number more than the others (logging, data augmentation, a branch), after which dropout
masks of replicated activations differ.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words

COST = frozenset({"ranks"})
EVERY = 10
STAGE = "forward"


def check(evidence: Evidence) -> list[Finding]:
    """Find random states that came apart."""
    axes = frozenset({"tp"})
    group = along(evidence, axes)
    if len(group) < 2 or evidence.before is None or not any(peer.marks["drawn"] for peer in group):
        return []
    earlier = {peer.rank: peer.marks["random"] for peer in evidence.before.peers}
    if len({earlier.get(peer.rank) for peer in group}) > 1 or len({peer.marks["random"] for peer in group}) == 1:
        return []
    text = f"random states came apart in the {group_words(evidence, axes, group)} since step {evidence.before.step}"
    return [
        evidence.finding("random_streams", text, "random state", "value", measured="different", expected="equal", kind="scalar")
    ]
