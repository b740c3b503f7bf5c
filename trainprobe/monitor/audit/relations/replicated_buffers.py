"""Buffers that are equal on data-parallel ranks at first stay equal.

Relation: a buffer that had the same bits on all data-parallel ranks before the first forward of the run has them before the
first forward of each later audited step. Running statistics of normalisation layers, which each rank keeps by itself unless
they are synchronised, are left out, and so is a model whose wrapper hands the buffers of one rank to the others at each
forward. Tolerance none. Reported as a warning: a buffer may belong to its rank.
Usually caused by a state that follows the data without the optimizer (a codebook, a queue, a centre, the load of experts) and
whose sums are not reduced over the ranks: each rank then works with its own, and a checkpoint keeps that of one.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.updates import BufferStates
from trainprobe.monitor.audit.messages import key_of

COST = frozenset({"fingerprints", "ranks"})
OBSERVERS = frozenset({"buffers"})
STAGE = "state"
_DATA = frozenset({"dp", "cp"})
_OF_EACH_RANK = ("running_mean", "running_var", "num_batches_tracked")


def check(evidence: Evidence) -> list[Finding]:
    """Find buffers that went apart."""
    if len(evidence.peers) < 2 or evidence.model.broadcasts:
        return []
    differing = [name for name in evidence.of(BufferStates).begun if is_shared(name) and _differs(evidence, name)]
    if not differing:
        return []
    over = evidence.over(differing[0], "begun") & _DATA
    text = (
        f"the buffer {and_more(differing)} differs in the {group_words(evidence, over, along(evidence, over))}, where it was "
        "equal at first. Each rank follows its own data, and a checkpoint keeps the buffer of one"
    )
    hint = "all_reduce what the buffer is updated with, or hand it from one rank to all (broadcast_buffers=True)"
    return [
        evidence.found(
            text, differing, "buffer", next=hint, measured="different bits", expected="equal on all ranks", kind="buffer"
        )
    ]


def is_shared(name: str) -> bool:
    """Tell by its name whether the ranks are expected to keep a buffer equal."""
    return name.rpartition(".")[2] not in _OF_EACH_RANK


def _differs(evidence: Evidence, name: str) -> bool:
    over, key = evidence.over(name, "begun") & _DATA, key_of(name, "begun")
    return bool(over) and len({peer.rows[key][0] for peer in along(evidence, over) if key in peer.rows}) > 1
