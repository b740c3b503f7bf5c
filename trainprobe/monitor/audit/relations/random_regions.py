"""Dropout within a tensor-parallel region draws other numbers on every rank.

Relation: where the framework keeps a random state of its own for what is split over tp, the states of the ranks of a tp group
differ from each other. Tolerance none. Nothing is judged where no such state is reported (only Megatron's tracker is).
Usually caused by one seed for all ranks, by a state that was loaded from one rank's checkpoint, or by a reset: masks of the
split activations are then copies of each other, and the regularisation is weaker than declared.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words

COST = frozenset({"ranks"})
OBSERVERS = frozenset({"random_states"})
STAGE = "forward"


def check(evidence: Evidence) -> list[Finding]:
    """Find ranks whose regions draw the same numbers."""
    axes = frozenset({"tp"})
    group = [peer for peer in along(evidence, axes) if peer.marks["region"]]
    ranks_of: dict[int, list[int]] = {}
    for peer in group:
        ranks_of.setdefault(peer.marks["region"], []).append(peer.rank)
    sharing = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if sharing is None:
        return []
    text = (
        f"ranks {', '.join(map(str, sharing))} draw the same random numbers within tensor-parallel regions "
        f"({group_words(evidence, axes, group)})"
    )
    hint = "seed each tp rank's region by its rank (model_parallel_cuda_manual_seed), and restore each rank's own state"
    return [
        evidence.found(
            text,
            "random state of tensor-parallel regions",
            next=hint,
            measured="equal",
            expected="different",
            kind="scalar",
            severity="error",
        )
    ]
