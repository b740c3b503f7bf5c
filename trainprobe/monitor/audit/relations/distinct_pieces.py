"""Different pieces of one tensor have different elements.

Relation: of two ranks that are declared to hold different rectangles of one weight (tensor parallel, FSDP2, ZeRO 3), each of at
least 64 elements that are neither all the same number nor NaN, the values do not have the same fingerprint. Tolerance none.
Reported as a warning, because weights may be made so on purpose.
Usually caused by ranks that draw their pieces from the same random state: a column-parallel layer then has the same columns on
each rank, they get the same gradients, and the layer stays as narrow as one rank's part of it. Also by a checkpoint whose one
shard was loaded on every rank. Random numbers cannot violate this, nor can zeros or ones.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import piece_of

COST = frozenset({"fingerprints", "ranks"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "set-up"
PYTORCH_ONLY = "which piece of a logical tensor a rank holds is not known"
_ELEMENTS = 64  # fewer may well be equal


def check(evidence: Evidence) -> list[Finding]:
    """Find the weights of which another rank holds the same numbers as another piece."""
    if len(evidence.peers) < 2:
        return []
    same = {name: ranks for name in evidence.tensors.with_slot("value") if (ranks := _ranks_with_the_same(evidence, name))}
    if not same:
        return []
    first, *_ = same
    ranks = ", ".join(map(str, sorted({evidence.place.rank, *same[first]})))
    text = (
        f"ranks {ranks} hold different pieces of {and_more(list(same), len(evidence.tensors.names))}, and the pieces are equal "
        "to the bit"
    )
    hint = "give each rank of the group a random state of its own where it makes its piece, or load its own shard"
    return [
        evidence.found(
            text, first, next=hint, measured="one fingerprint", expected="one for each piece", floor=0.0, names=list(same)
        )
    ]


def _ranks_with_the_same(evidence: Evidence, name: str) -> list[int]:
    """Return the other ranks whose piece of a weight is another one and has the same elements."""
    seen, key, share = evidence.tensors, key_of(name, "value"), key_of(name, "grad")
    fingerprint = seen.checksum(name, "value")
    if fingerprint is None or seen.number(name, "value", "count") < _ELEMENTS:
        return []
    if not seen.number(name, "value", "min") < seen.number(name, "value", "max"):  # NaN holds nothing either
        return []
    own = piece_of(evidence, name, "value")
    if not own:
        return []
    copies = {peer.rank for peer in along(evidence, evidence.over(name, "value"))}
    others = (peer for peer in evidence.peers if peer.rank not in copies and share in peer.gradients and key in peer.rows)
    return [peer.rank for peer in others if peer.gradients[share].piece not in (0, own) and peer.rows[key][0] == fingerprint]
