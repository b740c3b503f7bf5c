"""Clipping by norm multiplies every gradient by one coefficient, the same on all ranks.

Relation: ‖g after‖ / ‖g before‖ is one number over all parameters of a rank that were clipped in one call, and over all
ranks; and an update comes after the call that clips, in the same step. Floor: 2e-3 of it over parameters, 1e-4 over ranks,
and twice half a unit in the last place of the gradients' format where that has 16 bits. Where elements were clipped by value
nothing is judged. Usually caused by a norm that was taken over the wrong ranks or over a part of the parameters, or by clipping
on some ranks only, or behind the update.
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, differs_over_ranks
from trainprobe.monitor.audit.facts.gradients import ClippedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.relations.replicas import differs

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"clips", "updates"})
STAGE = "clipping"
PYTORCH_ONLY = "no cell is known that clips: gradients are seen once, as the optimizer gets them"
_OVER_PARAMETERS, _OVER_RANKS = 2e-3, 1e-4


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters and ranks with a coefficient of their own."""
    return [*_too_late(evidence), *_over_ranks(evidence), *_over_parameters(evidence)]


def _too_late(evidence: Evidence) -> list[Finding]:
    late = next((c for c in evidence.of(ClippedGradients).clips if not c.used and c.names and c.norm > c.limit), None)
    if late is None or not evidence.of(UpdateCounts).updates:
        return []
    text = (
        f"gradients of norm {late.norm:.6g} were clipped to {late.limit:g} after the update that used them: "
        "the update was made with unclipped gradients"
    )
    hint = "clip between the backward pass and optimizer.step()"
    return [evidence.found(text, "grad_norm", next=hint, measured=late.norm, expected=late.limit, kind="scalar")]


def _over_parameters(evidence: Evidence) -> list[Finding]:
    calls = dict.fromkeys(clip.names for clip in evidence.of(ClippedGradients).clips)
    disjoint = len(calls) > 1 and len(frozenset[str]().union(*calls)) == sum(map(len, calls))
    together = list(calls) if disjoint else [frozenset(evidence.tensors.names)]  # each optimizer may clip by its own norm
    return [finding for names in together for finding in _in_one_call(evidence, names)]


def _in_one_call(evidence: Evidence, names: frozenset[str]) -> list[Finding]:
    seen = evidence.tensors
    ratios: dict[str, float] = {}
    for name in (name for name in seen.with_slot("grad_unclipped") if name in names):
        before = seen.number(name, "grad_unclipped", "norm")
        if (name, "grad") not in seen or not before > 1e-30:
            continue
        ratio = seen.number(name, "grad", "norm") / before
        if abs(seen.number(name, "grad", "absmax") / seen.number(name, "grad_unclipped", "absmax") - ratio) > 0.01 * ratio:
            return []  # not a mere factor: clipped by value
        ratios[name] = ratio
    if len(ratios) < 2:
        return []
    middle = float(np.median(list(ratios.values())))
    floor = _OVER_PARAMETERS + _rounding(evidence)
    outliers = [name for name, ratio in ratios.items() if abs(ratio - middle) > floor * middle + 1e-12]
    if not outliers:
        return []
    text = f"clipping multiplied {and_more(outliers, len(ratios))} by {ratios[outliers[0]]:.6g} and the others by {middle:.6g}"
    return [
        evidence.found(text, outliers, "grad", measured=ratios[outliers[0]], expected=middle, floor=floor, severity="error")
    ]


def _over_ranks(evidence: Evidence) -> list[Finding]:
    def words(listed: str) -> str:
        seen = evidence.tensors
        replicated = [name for name in seen.with_slot("grad_unclipped") if evidence.over(name, "grad_unclipped")]
        several = any(differs(evidence, name, "grad_unclipped") for name in replicated)
        joined = several and not any(differs(evidence, name, "grad") for name in replicated)
        why = (
            "each rank clipped its own gradients before the reduction"
            if joined
            else "the ranks took the norm over different gradients"
        )
        return f"clip coefficients differ over the ranks: {listed}. Cause: {why}"

    floor = _OVER_RANKS + _rounding(evidence)
    return differs_over_ranks(evidence, "coefficient", "clip coefficient", floor, words, digits=6)


def _rounding(evidence: Evidence) -> float:
    """Return how far a coefficient can be off because gradients before and after it are rounded."""
    return 2 * evidence.tensors.half_unit("grad", "grad_unclipped")
