"""The applied gradient is the gradient of the declared loss, taken over the whole batch.

Relation: with a the gradient that is applied (before clipping), d that of the loss that the user declares, averaged over the
dp and cp ranks, ‖a‖² = ⟨a, d⟩ over all parameters and for each of them; on one rank also ‖a‖ = ‖d‖. Floor: 1e-3 of ‖a‖² for
float32, 5e-2 where a parameter is of a shorter format. The inner products are taken on each rank, and only they travel.
Usually caused by gradient accumulation that averages means of micro-batches of different lengths (transformers issue 34191),
by a loss that is scaled by a group's size (Megatron-LM issue 906), or by gradients that are summed where they should be
averaged; Adam hides a factor.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.gradients import Projection, Projections
from trainprobe.monitor.audit.messages import key_of

COST = frozenset({"rerun", "ranks"})
OBSERVERS = frozenset({"backward_starts", "declared_loss"})
STAGE = "whole gradient"
PYTORCH_ONLY = "a loss can be declared to a PyTorch training only"
AXES = frozenset({"dp", "cp"})


def check(evidence: Evidence) -> list[Finding]:
    """Find an applied gradient that is not that of the declared loss."""
    mine = evidence.of(Projections).projections
    if not mine:
        return []
    floor = (
        1e-3 if all("float32" in d or "float64" in d for (_, s), d in evidence.tensors.dtypes.items() if s == "value") else 5e-2
    )
    projections, averaged = _over_ranks(evidence, mine)
    applied, both = sum(p.applied for p in projections), sum(p.both for p in projections)
    wrong = [p for p in projections if abs(p.applied - p.both) > 10 * floor * p.applied + 1e-6 * applied]
    differs = abs(applied - both) > floor * applied
    lengths = abs(applied - sum(p.declared for p in projections)) > 2 * floor * applied and not averaged
    if not applied > 0 or not (wrong or differs or lengths):
        return []
    ratio = applied / both if both else float("inf")
    names = [p.name for p in wrong] or [max(projections, key=lambda p: abs(p.applied - p.both)).name]
    same = all(abs(p.applied - ratio * p.both) <= 10 * floor * p.applied + 1e-6 * applied for p in projections)
    where = "every parameter" if same and len(projections) > 1 else and_more(names, len(projections))
    how = f"Applied over declared is {ratio:.3f}" + (" for every parameter" if same else "")
    over = f" (averaged over the {group_words(evidence, AXES, along(evidence, AXES))})" if averaged else ""
    text = f"the applied gradient of {where} is not that of the declared loss{over}. {how}"
    hint = "check what the loss is divided by: tokens of the whole batch, over all micro-batches and ranks"
    return [evidence.found(text, names, "grad", next=hint, measured=ratio, expected=1.0, floor=floor, severity="error")]


def _over_ranks(evidence: Evidence, mine: Sequence[Projection]) -> tuple[list[Projection], bool]:
    """Average ⟨a, d⟩ over the ranks whose gradients are averaged. Those of a tensor-parallel group stay each by itself."""
    group = [peer for peer in along(evidence, AXES) if peer.projections]
    if len(group) < 2:
        return list(mine), False
    out: list[Projection] = []
    for p in mine:
        projections = [peer.projections[key_of(p.name, "both")] for peer in group if key_of(p.name, "both") in peer.projections]
        out.append(Projection(p.name, p.applied, p.declared, sum(projections) / len(projections)))
    return out, True
