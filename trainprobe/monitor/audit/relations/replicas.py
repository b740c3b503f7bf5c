"""Replicas are bit-equal: values, optimizer state, gradients before and after clipping, and buffers.

Relation: within each group of ranks that hold the same tensor (dp, cp, tp-replicated …), its fingerprint is the same on every
rank. Tensors are compared in causal order. Tolerance zero. The source of the parameters, or the placement of a DTensor, says
which parameters are replicated. Along an axis without such knowledge, parameters count as replicated if they were equal at the
first comparison. If the used gradients of all parameters are equal on all ranks, the values of parameters with a non-zero
gradient must be equal too, even if they never were: one update cannot be right for different weights. Ranks that differ in `dp`
and hold the same shard of a tensor (hybrid sharding) are replicas of it.
Usually caused by a reduction that is missing or runs in the wrong group (Megatron-LM issue 1446), by clipping on some ranks
only (DeepSpeed issue 1801), by a wrapper that was not called, or by corrupted memory.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.updates import BufferStates
from trainprobe.monitor.audit.messages import digest, key_of
from trainprobe.monitor.audit.peers import Peer

COST = frozenset({"fingerprints", "ranks"})
OBSERVERS = frozenset({"buffers", "model_calls", "random_states"})
STAGE = "reduction"
NOT_STATE = {"value", "main_value", "grad", "grad_unclipped", "grad_unreduced"}
_DATA = frozenset({"dp"})
_TOLERANCE, _TOLERANCE_SHORT = 1e-5, 2e-3  # how far ratios of norms lie apart that are one factor: float32, shorter formats
WORDS = {
    "value": "the weights differ before the update",
    "main_value": "the master weights differ before the update",
    "grad_unclipped": "the gradients differ before clipping",
    "grad": "the gradients that the optimizer uses differ",
    "buffer": "the buffers differ",
}


def check(evidence: Evidence) -> list[Finding]:
    """Find the first thing that differs between replicas; what follows from it is not reported."""
    if len(evidence.peers) < 2:
        return []
    own_step = evidence.history.handed_over  # which its owner alone clips and uses
    any_unclipped = any(evidence.tensors.with_slot("grad_unclipped"))
    states = sorted({slot for _, slot in evidence.tensors.rows if slot not in NOT_STATE and not slot.endswith("_after")})
    for slot in ("value", "main_value", *states, "grad_unclipped", "grad"):
        held = evidence.tensors.with_slot(slot)
        held = [name for name in held if slot != "grad" or name not in own_step] if any_unclipped else held
        differing = [name for name in held if copied_over(evidence, name, slot) and differs(evidence, name, slot)]
        missing = [name for name in evidence.tensors.names if slot == "grad" and _without(evidence, name)]
        if missing:
            return [_missing(evidence, missing)]
        if differing and slot == "grad_unclipped" and not any(differs(evidence, name, "grad") for name in differing):
            continue  # they were clipped before they were joined, which `clipping` tells
        if differing and slot == "grad":
            outliers = beyond_one_factor(evidence, differing)
            return (
                [_finding(evidence, slot, outliers or differing, scaled=bool(outliers))] if outliers or outliers is None else []
            )
        if differing:
            return [_finding(evidence, slot, differing)]
    buffers = [
        name
        for name in evidence.of(BufferStates).updated
        if evidence.over(name, "buffer") and differs(evidence, name, "buffer")
    ]
    return [_finding(evidence, "buffer", buffers)] if buffers else _never_equal(evidence)


def _never_equal(evidence: Evidence) -> list[Finding]:
    """Find weights that differ although every rank updates them by the same gradients."""
    seen, ranks = evidence.tensors, evidence.peers
    trained = {name: key_of(name, "grad") for name in seen.with_slot("grad")}
    if any(seen.pieces.get((name, "grad")) or any(key not in peer.rows for peer in ranks) for name, key in trained.items()):
        return []
    if any(len({peer.rows[key] for peer in ranks}) > 1 for key in trained.values()):
        return []
    moved = [name for name, key in trained.items() if ranks[0].rows[key][1] > 0]
    values = {name: {peer.rows.get(key_of(name, "value"), (0, 0.0))[0] for peer in ranks} for name in moved}
    apart = [name for name, fingerprints in values.items() if len(fingerprints) > 1]
    if not apart:
        return []
    text = (
        f"the weights of {and_more(apart)} differ between ranks {', '.join(str(peer.rank) for peer in ranks[:8])}, though the "
        "gradients that the optimizer uses are equal: the replicas were never made equal"
    )
    hint = "give all ranks one seed while the model is made, or broadcast the weights of one rank before the first step"
    return [evidence.found(text, apart, next=hint, measured="different", expected="equal", severity="error")]


def group_of(evidence: Evidence, name: str, slot: str) -> list[Peer]:
    """Return the ranks that hold the same tensor as this one."""
    key, share, piece = key_of(name, slot), key_of(name, "grad"), piece_of(evidence, name, slot)
    line = [peer for peer in along(evidence, copied_over(evidence, name, slot)) if key in peer.rows]
    return [peer for peer in line if share in peer.gradients and peer.gradients[share].piece == piece] if piece else line


def copied_over(evidence: Evidence, name: str, slot: str) -> frozenset[str]:
    """Return the axes along which the ranks lie that may hold the same tensor as this one."""
    return evidence.over(name, slot) | (_DATA if piece_of(evidence, name, slot) else frozenset())


def piece_of(evidence: Evidence, name: str, slot: str) -> int:
    """Return the digest of the piece that a tensor is; 0: it is whole, or the ranks reported how another one is cut."""
    pieces = evidence.tensors.pieces
    rectangle = pieces.get((name, slot), pieces.get((name, "value"), ""))
    if not rectangle:
        return 0
    own = next(peer for peer in evidence.peers if peer.rank == evidence.place.rank)
    share = own.gradients.get(key_of(name, "grad"))
    return share.piece if share is not None and share.piece == digest(rectangle) else 0


def differs(evidence: Evidence, name: str, slot: str) -> bool:
    """Tell whether a replicated tensor has more than one fingerprint; one that no rank reported does not differ."""
    key = key_of(name, slot)
    return len({peer.rows[key][0] for peer in group_of(evidence, name, slot)}) > 1


def _without(evidence: Evidence, name: str) -> list[int]:
    """Return the ranks that have no gradient of a parameter of which others have one, unless the ranks share it out."""
    over, key = evidence.over(name, "grad"), key_of(name, "grad")
    line = along(evidence, over)
    if any(key in peer.gradients and peer.gradients[key].over != over for peer in line):
        return []
    ranks = [peer.rank for peer in line if key not in peer.rows and key_of(name, "value") in peer.rows]
    return ranks if len(ranks) < len(line) else []


def _missing(evidence: Evidence, names: list[str]) -> Finding:
    ranks = ", ".join(map(str, _without(evidence, names[0])))
    over = evidence.over(names[0], "grad")
    where = group_words(evidence, over, along(evidence, over))
    text = f"{and_more(names)} has a gradient in the {where}, but not on rank {ranks}: that rank skips this update"
    return evidence.found(text, names, "grad", measured=f"none on rank {ranks}", expected="on every rank", severity="error")


def beyond_one_factor(evidence: Evidence, names: list[str]) -> list[str] | None:
    """Return the parameters whose gradients differ by more than one factor between ranks that most share; None: there is no
    such factor.

    An empty list says that clipping alone tells them apart: they were bit-equal before it, or differ by one factor throughout,
    or by that of the norms that the ranks report.
    """
    seen = evidence.tensors
    if all((name, "grad_unclipped") in seen and not differs(evidence, name, "grad_unclipped") for name in names):
        return []
    if names and all(_by_own_norm(evidence, name) for name in names):
        return []
    tolerance = _TOLERANCE if all("float32" in seen.dtypes.get((name, "grad"), "") for name in names) else _TOLERANCE_SHORT
    ratios: dict[str, float] = {}
    for name in names:
        norms = [peer.rows[key_of(name, "grad")][1] for peer in group_of(evidence, name, "grad")]
        ratios[name] = norms[0] / norms[-1] if norms[-1] > 0 else float("inf")
    finite = np.array([ratio for ratio in ratios.values() if np.isfinite(ratio)])
    if finite.size < 2:
        return None
    middle = float(np.median(finite))
    outliers = [name for name, ratio in ratios.items() if not abs(ratio - middle) <= tolerance * middle]
    return None if len(outliers) > 0.5 * len(ratios) else outliers


def _by_own_norm(evidence: Evidence, name: str) -> bool:
    """Tell whether ‖g‖ times the reported norm is one number over the ranks, and the reported norm is not."""
    norms = [(p.rows[key_of(name, "grad")][1], p.numbers["reported_norm"]) for p in group_of(evidence, name, "grad")]
    if len({norm for _, norm in norms}) < 2:
        return False
    products = [own * norm for own, norm in norms]
    return max(products) - min(products) <= _TOLERANCE_SHORT * 0.1 * max(products)


def _finding(evidence: Evidence, slot: str, names: list[str], scaled: bool = False) -> Finding:
    first = names[0]
    group, key = group_of(evidence, first, slot), key_of(first, slot)
    minority, norms = minority_ranks(group, key)
    words = WORDS.get(slot, f"the optimizer state {slot} differs before the update")
    over = copied_over(evidence, first, slot)
    cause = _cause(evidence, slot, names, group, key)
    if scaled:
        cause += ". All further gradients differ by one factor alone: the clip coefficient, which follows from it"
    where = f"{group_words(evidence, over, group)}: {and_more(names)}, ranks {minority}. Norms: {norms}"
    seen = dict.fromkeys(f"{peer.rows[key][0]:016x}" for peer in group)
    return evidence.found(
        f"{words} in the {where}{cause}",
        first,
        slot,
        next=_advice(evidence, slot, first, group),
        measured=f"fingerprints {', '.join(list(seen)[:4])}",
        expected="one fingerprint",
        floor=0.0,
        severity="error",
        names=names,
    )


def minority_ranks(group: list[Peer], key: int) -> tuple[str, str]:
    """Name the ranks whose fingerprint is not the usual one (all, if there is no usual one), and the norms on some ranks."""
    usual, count = Counter(peer.rows[key][0] for peer in group).most_common(1)[0]
    minority = [peer.rank for peer in group if peer.rows[key][0] != usual or count == 1]
    norms = ", ".join(f"{peer.rows[key][1]:.9g} on rank {peer.rank}" for peer in group[:4])
    return ", ".join(map(str, minority)), norms


def _cause(evidence: Evidence, slot: str, names: list[str], group: list[Peer], key: int) -> str:
    """Say in plain words what usually causes this."""
    empty = [peer.rank for peer in group if peer.rows[key][1] == 0]
    if empty and len(empty) < len(group):
        return (
            f". It is all zeros on rank {', '.join(map(str, empty))}: a collective lost its payload, or the rank was not in it"
        )
    if slot in ("grad", "grad_unclipped"):
        if _draw_apart(evidence, slot, names[0], group):
            return ". The random states of the ranks differ and the forward draws: dropout masks of replicated layers differ"
        everything = len(names) >= 0.9 * sum(1 for _ in evidence.tensors.with_slot(slot))
        if everything and evidence.of(TrainingCalls).bypassed and evidence.model.wrapped:
            return f". The program called the model inside {evidence.model.wrapped}, which therefore reduced nothing"
        if everything:
            return ". Every gradient differs: none was reduced over the group"
        return ". A reduction over this group is missing: each rank has a partial sum"
    if slot == "value" and len(names) == 1:
        return ". It is the only one: it was overwritten, or its memory is corrupted (a flipped bit)"
    return ""


def _draw_apart(evidence: Evidence, slot: str, name: str, group: list[Peer]) -> bool:
    """Tell whether ranks that share their data drew other random numbers in the forward."""
    shared = evidence.axes & copied_over(evidence, name, slot) <= {"tp"} and len({peer.batches for peer in group}) == 1
    return shared and len({peer.marks["random"] for peer in group}) > 1 and any(peer.marks["drawn"] for peer in group)


def _advice(evidence: Evidence, slot: str, name: str, group: list[Peer]) -> str:
    if slot in ("grad", "grad_unclipped") and _draw_apart(evidence, slot, name, group):
        return "give all ranks of a tensor-parallel group one seed, and those regions that are split one for each rank"
    if slot in ("grad", "grad_unclipped"):
        return "check that this parameter's gradient is all-reduced over the group before clipping and the update"
    a, b = (f"again/step{evidence.step}/rank{peer.rank}" for peer in (group[0], group[-1]))
    return f"record the step again (level: mix, step: [{evidence.step}], output: again); `trainprobe dump-compare {a} {b}`"
