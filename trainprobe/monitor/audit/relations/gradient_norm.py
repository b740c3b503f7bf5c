"""The reported gradient norm is the norm over the logical (unsharded) gradients.

Relation: the reported scalar equals √Σ‖g‖² over all parameters, with each element of the logical model counted once, before
clipping. It is the same on all ranks. A report of the norm after clipping is a warning if one call of `torch.nn.utils` shows
the norm before: the norm after clipping cannot exceed the threshold. If several calls clip the gradients of several optimizers,
each norm is that of the gradients that the call was given. If a call is given gradients of more than the model, nothing is
judged. If a loop clips by itself, the norm before clipping is only known to be at least the norm after it.
Floor: 2e-3 of the norm, and half a unit in the last place for each 16-bit format of the gradients (norms of single gradients
are rounded to it) or of the reported number. A norm that equals the largest magnitude (norm type infinity) is accepted, and so
is a loss scale that is still in the gradients.
Usually caused by a norm over one rank's shards (pytorch issue 170862, Megatron-LM issue 5916), or by counting replicas.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import HALF_UNITS, Evidence, differs_over_ranks
from trainprobe.monitor.audit.facts.gradients import ClippedGradients
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.relations.replicas import differs
from trainprobe.monitor.audit.replication import logical_norms
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"clips"})
STAGE = "clipping"
_FLOOR, _RANKS_FLOOR = 2e-3, 1e-5
_ALONE = "report what clip_grad_norm_ returns, called with all parameters that the optimizer steps"
_NEXT = "sum the squares over every group that shards parameters, and count replicas once"


def check(evidence: Evidence) -> list[Finding]:
    """Find a reported norm that is not the true one."""
    differing = _over_ranks(evidence)
    if differing:
        return differing
    if any(clip.others for clip in evidence.of(ClippedGradients).clips):
        return []
    reported = scalar(evidence.scalars, "gradient norm")
    true = evidence.norms.get("unclipped")
    if reported is None or true is None or not true > 0 or reported != reported:
        return []
    parts = _of_each_call(evidence)
    wrong = next(((norm, value) for norm, value in parts if not _accepted(evidence, norm, [value])), None)
    if wrong is not None:
        return [_finding(evidence, *wrong)]
    if _accepted(evidence, reported, [true, *(value for _, value in parts)]):
        return []
    clipped = evidence.norms.get("clipped", true)
    if _accepted(evidence, reported, [clipped]):
        return [_after_clipping(evidence, reported, true)] if len(evidence.of(ClippedGradients).clips) == 1 else []
    scale = scalar(evidence.scalars, "loss scale") or 1.0
    if not any(evidence.tensors.with_slot("grad_unclipped")) and reported * scale > true:
        return _by_itself(evidence, reported, true)
    return [_finding(evidence, reported, true)]


def _accepted(evidence: Evidence, norm: float, norms: list[float]) -> bool:
    scale = scalar(evidence.scalars, "loss scale") or 1.0
    values = [*norms, _largest(evidence)]
    floor = _floor(evidence, norm)
    return any(abs(norm * factor - value) <= floor * value for value in values for factor in (1.0, scale))


def _floor(evidence: Evidence, norm: float) -> float:
    """Return the relative error that a reported norm may have."""
    return _FLOOR + evidence.tensors.half_unit("grad", "grad_unclipped") + _format_of(norm)


def _format_of(norm: float) -> float:
    """Return half a unit in the last place of the shortest format that holds a number as it is; 0 for 32 bits and more."""
    with np.errstate(over="ignore"):  # what is too large for a format is infinite there, and not equal
        bits, half = int(np.float32(norm).view(np.uint32)), float(np.float16(norm))
    return 0.0 if bits & 0xFFFF and half != norm else HALF_UNITS["float16" if bits & 0xFFFF else "bfloat16"]


def _of_each_call(evidence: Evidence) -> list[tuple[float, float]]:
    """Return (norm found, true norm) of each call that clipped, where there were several and no gradient is in two of them."""
    clips, seen = evidence.of(ClippedGradients).clips, evidence.tensors
    if len(clips) < 2 or sum(len(clip.names) for clip in clips) > len(frozenset[str]().union(*(c.names for c in clips))):
        return []
    out: list[tuple[float, float]] = []
    for clip in clips:
        if evidence.peers:
            true = logical_norms(evidence.peers, evidence.axes, {key_of(name, "grad") for name in clip.names})[0]
        else:
            true = sum(seen.number(name, "grad_unclipped", "norm") ** 2 for name in clip.names) ** 0.5
        if true > 0 and clip.norm == clip.norm:
            out.append((clip.norm, true))
    return [] if evidence.axes - {"dp", "cp"} else out  # other axes have gradients that have no name here


def _finding(evidence: Evidence, reported: float, true: float) -> Finding:
    own, several = evidence.norms.get("own"), len(evidence.peers) > 1
    why, hint = "", _NEXT if several else _ALONE
    if _is_scaled(evidence, reported, true):
        why = ". That factor is the loss scale, which is still in the gradients that the norm was taken of"
        hint = "unscale before the norm is taken and gradients are clipped: scaler.unscale_(optimizer)"
    elif own is not None and several and abs(reported - own) <= _floor(evidence, reported) * own:
        why = f"; it is the norm of what rank {evidence.place.rank} holds: the sum over the ranks is missing"
    elif not reported:
        why = ". It was taken of no gradient, and none was clipped"
        hint = "give clip_grad_norm_ a list: a filter or generator that the optimizer was made of is used up"
    text = f"the reported gradient norm {reported:.6g} is {reported / true:.4g} times the true one, {true:.6g}{why}"
    return _finding_of_norms(evidence, text, reported, true, next=hint)


def _is_scaled(evidence: Evidence, reported: float, true: float) -> bool:
    """Tell whether a norm is a loss scale times the true one: this step's, or the next, which a scaler doubles or halves."""
    scale, factor = scalar(evidence.scalars, "loss scale") or 1.0, reported / true
    return any(s > 1 and abs(factor - s) <= _floor(evidence, reported) * s for s in (scale, 2 * scale, scale / 2))


def _after_clipping(evidence: Evidence, reported: float, true: float) -> Finding:
    text = (
        f"the reported gradient norm {reported:.6g} is that after clipping, and was {true:.6g} before it. A norm that is "
        "reported so never exceeds the threshold, and hides every spike"
    )
    return _finding_of_norms(evidence, text, reported, true, severity="warning", next="report what clip_grad_norm_ returns")


def _finding_of_norms(
    evidence: Evidence, text: str, measured: float, expected: float, next: str, severity: str = "error"
) -> Finding:
    """Return a finding of two norms that are further apart than the noise floor."""
    floor = _floor(evidence, measured) * expected
    numbers: dict[str, Any] = {"measured": measured, "expected": expected, "floor": floor}
    return evidence.found(text, "grad_norm", next=next, kind="scalar", severity=severity, **numbers)


def _by_itself(evidence: Evidence, reported: float, true: float) -> list[Finding]:
    """Judge a loop that clips by itself: the norm before that is not known, the one after it is the threshold."""
    before = evidence.before
    scaled = any(differs(evidence, name, "grad") for name in evidence.tensors.names if evidence.over(name, "grad"))
    if before is None or scaled:
        return []
    floor = _floor(evidence, reported)
    was, reported_before = before.norms.get("clipped", 0.0), scalar(before.scalars, "gradient norm") or 0.0
    clipped = reported_before > was * (1 + floor) > 0
    if not clipped or abs(true - was) <= floor * was:
        return []
    text = (
        f"the gradient that was clipped by the reported norm {reported:.6g} has norm {true:.6g} and "
        f"not {was:.6g}, as at step {before.step}. "
        f"{'The reported norm' if true < was else 'The true norm'} is {max(true, was) / min(true, was):.4g} times "
        f"{'the true one' if true < was else 'the reported one'}"
    )
    return [_finding_of_norms(evidence, text, true, was, next=_NEXT)]


def _over_ranks(evidence: Evidence) -> list[Finding]:
    def words(listed: str) -> str:
        why = "each rank reports the norm of its own shard, without the sum over ranks"
        return f"the reported gradient norms differ over the ranks: {listed}. Cause: {why}"

    hint = "sum the squares over every group that shards parameters"
    return differs_over_ranks(evidence, "reported_norm", "grad_norm", _RANKS_FLOOR, words, digits=9, next=hint)


def _largest(evidence: Evidence) -> float:
    seen = evidence.tensors
    slot = "grad_unclipped" if any(seen.with_slot("grad_unclipped")) else "grad"
    return max((seen.number(name, slot, "absmax") for name in seen.with_slot(slot)), default=0.0)
