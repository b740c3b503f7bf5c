"""Reduction over the ranks multiplies every gradient by the same factor.

Relation: let uᵣ be the gradient of the backward pass on rank r, summed over the micro-batches, and g the gradient that is used,
before clipping. Then ⟨g, w⟩ = c Σᵣ⟨uᵣ, w⟩ for fixed weights w, with one factor c for all parameters: 1 / ranks for a mean, 1
for a sum, times the loss scale. The sum is over the ranks that hold the parameter. Judged if the ranks differ only in dp, cp
and pp, and what has one name on several of them is replicated. Floor: 0.05 ‖g‖ and 0.05 of the product, because gradients may
be reduced in 16 bits.
If every rank of a dp group reports the loss of its own backward passes, c is not 1: the gradient would be that of the sum, and
the report that of one rank or of the mean. Without a loss scale, c stays what it was at three checked steps in a row with as
many backward passes. If no call of `torch.nn.utils` clips, only a change by a whole number (within 1e-4) is reported. Both are
warnings.
Usually caused by a parameter that is divided twice or never, that is reduced in the wrong group, or whose last micro-batch
comes after its reduction, and by a communication hook or loop that sums and does not divide. All ranks agree on the result, so
comparing replicas does not show it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along
from trainprobe.monitor.audit.facts.gradients import Backwards, ClippedGradients, Projections, Reductions
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import differs
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"rerun", "ranks"})
OBSERVERS = frozenset({"backward_starts", "clips", "declared_loss", "gradient_use", "reduced_gradients"})
STAGE = "reduction"
PYTORCH_ONLY = "the gradients of one rank are not seen before they are reduced"
_FLOOR = 0.05
_WHOLE = 1e-4
STEADY = 3


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that were reduced by a factor of their own."""
    mine = evidence.of(Reductions).reductions
    ratios, totals = _ratios(evidence)
    if len(ratios) < 3:
        return []
    factor = float(np.median(list(ratios.values())))
    another = _another_divisor(evidence, factor, mine[0].name)
    if another:
        return another
    if abs(factor - 1) <= _FLOOR and evidence.axes == frozenset({"dp"}) and _reports_its_own(evidence):
        return [_summed(evidence, mine[0].name)]
    outliers = [
        seen.name
        for seen in mine
        if abs(seen.used - factor * totals[seen.name]) > _FLOOR * (seen.norm + abs(factor * totals[seen.name]))
    ]
    if not outliers or 2 * len(outliers) > len(mine) or any(differs(evidence, name, "grad") for name in evidence.tensors.names):
        return []  # what differs between replicas is reported by `replicas`
    own = ratios.get(outliers[0], float("nan")) / factor
    text = (
        f"the gradient of {and_more(outliers, len(mine))} is not what the ranks' own gradients make of it. It is {own:.4g} "
        "times what the reduction of the others gives"
    )
    hint = "reduce every gradient once, over the same group and by the same divisor, after its last micro-batch"
    return [evidence.found(text, outliers, "grad", next=hint, measured=own, expected=1.0, floor=_FLOOR, severity="error")]


class _Divisor(NamedTuple):
    """The factor by which reduction multiplied all gradients, after how many backward passes, at how many steps in a row."""

    factor: float = 0.0
    passes: int = 0
    steps: int = 0


def remember(evidence: Evidence) -> _Divisor:
    """Return the one factor of all gradients as last seen."""
    factor, known = _factor_of_all(evidence), _known(evidence)
    if factor is None:
        return known
    same = known.passes == evidence.of(Backwards).count and abs(factor - known.factor) <= 1e-2 * abs(known.factor)
    return _Divisor(factor, evidence.of(Backwards).count, known.steps + 1 if same else 1)


def _known(evidence: Evidence) -> _Divisor:
    return evidence.remembered("reduced_gradients", _Divisor())


def _factor_of_all(evidence: Evidence) -> float | None:
    """Return the one factor that reduction multiplied all gradients by; None where it is not known or a loss scale is in it."""
    ratios, _ = _ratios(evidence)
    if len(ratios) < 3 or scalar(evidence.scalars, "loss scale") is not None:
        return None
    factor = float(np.median(list(ratios.values())))
    return factor if all(abs(ratio - factor) <= _FLOOR * abs(factor) for ratio in ratios.values()) else None


def _ratios(evidence: Evidence) -> tuple[dict[str, float], dict[str, float]]:
    """Return for each gradient the used one over the sum of the ranks' own, and that sum; nothing where none can be had."""
    mine = evidence.of(Reductions).reductions
    ratios: dict[str, float] = {}
    totals: dict[str, float] = {}
    if len(mine) < 3 or len(evidence.peers) < 2 or not evidence.axes <= {"dp", "cp", "pp"}:
        return {}, {}
    for seen in mine:
        key = key_of(seen.name, "arrived")
        group = [peer for peer in along(evidence, evidence.over(seen.name, "grad")) if key in peer.projections]
        if len(group) < sum(key in peer.projections for peer in evidence.peers):
            return {}, {}  # ranks hold different tensors under one name: parts, or layers of other stages
        totals[seen.name] = sum(peer.projections[key] for peer in group)
        if abs(seen.used) > _FLOOR * seen.norm and totals[seen.name]:
            ratios[seen.name] = seen.used / totals[seen.name]
    return ratios, totals


def _another_divisor(evidence: Evidence, factor: float, name: str) -> list[Finding]:
    was, passes, count = _known(evidence)
    if (
        count < STEADY
        or passes != evidence.of(Backwards).count
        or _factor_of_all(evidence) is None
        or evidence.of(Projections).projections
    ):
        return []  # the declared loss tells more
    times = max(factor / was, was / factor) if factor * was > 0 else 0.0
    whole = round(times) > 1 and abs(times - round(times)) <= _WHOLE * times
    if abs(factor - was) <= _FLOOR * abs(was) or not (evidence.of(ClippedGradients).clips or whole):
        return []  # a loop that clips by itself gives every step a factor of its own
    text = (
        f"all gradients are {factor / was:.4g} times what the ranks' own gradients made of them at each audited step before, "
        f"after as many backward passes. {name} and all others are {factor:.4g} times their sum, and were {was:.4g} times it"
    )
    hint = "divide by the number of ranks, and of micro-batches or tokens, as before"
    return [evidence.found(text, name, "grad", next=hint, measured=factor, expected=was, floor=_FLOOR)]


def _reports_its_own(evidence: Evidence) -> bool:
    """Tell whether the loss that each rank reports is that of its own backward passes, or the mean of that over the ranks."""
    own = [peer.numbers["differentiated"] for peer in evidence.peers]
    losses = [peer.numbers["loss"] for peer in evidence.peers]
    mean = sum(own) / len(own)
    return all(abs(r - o) <= 1e-4 * abs(o) for r, o in zip(losses, own, strict=True)) or all(
        abs(r - mean) <= 1e-4 * abs(mean) for r in losses
    )


def _summed(evidence: Evidence, name: str) -> Finding:
    world = len(evidence.peers)
    text = (
        f"the gradients of the {world} ranks are summed and not averaged, though each reports the loss that it differentiates. "
        f"{name} and all others get {world} times the gradient of the mean loss"
    )
    hint = "divide by the number of ranks, in the reduction or in the loss"
    return evidence.found(text, name, "grad", next=hint, measured=1.0, expected=1 / world, floor=_FLOOR)
