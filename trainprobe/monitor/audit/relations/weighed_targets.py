"""Every target of a step has the same weight.

Relation: let mᵢ be the factor of the mean loss of micro-batch i in the value from which its backward pass begins, and vᵢ the
number of its targets that are not ignored. mᵢ / vᵢ is the same for all micro-batches of a step. The usual violation is found:
all mᵢ are equal within 1e-3, and the largest vᵢ is 1.25 times the smallest or more, in this audited step and in the one before.
The same is found over the dp and cp ranks if a rank weighs its own micro-batches by their targets, or divides the sum of its
only one itself. Judged is one call of `cross_entropy` or `nll_loss` for each backward pass, without class weights. Reported as
a warning: some want a mean of means.
Usually caused by gradient accumulation that divides by the number of micro-batches while rows are padded or prompts are masked.
A target of a short micro-batch then weighs more than one of a long one, and the loss depends on how the batch is split (the
gradient accumulation bug of transformers, issue 34198). A training without padding has equal vᵢ, so it cannot violate this.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.calls import LossCalls
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.messages import Rows, key_of

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"gradient_use", "loss_inputs"})
STAGE = "backward"
_EQUAL = 1e-3
_RAGGED = 1.25
_TARGETS, _WEIGHT = key_of("targets", "weighed_targets"), key_of("weight", "weighed_targets")


class _Part(NamedTuple):
    """A micro-batch: its targets that count, and what its mean loss was multiplied by."""

    targets: float
    factor: float


def check(evidence: Evidence) -> list[Finding]:
    """Find means of micro-batches, or of ranks, that were averaged though they are of different numbers of targets."""
    parts, before = _parts(evidence), evidence.before
    if _is_mean_of_means(parts) and before is not None and _is_mean_of_means(_parts(before)):
        counts = [part.targets for part in parts]
        text = (
            f"the mean losses of {len(counts)} micro-batches weigh the same in the gradient, though they are means over "
            f"{_listed(counts)} targets. One target of the smallest weighs {max(counts) / min(counts):.3g} times as "
            "much as one of the largest"
        )
        hint = "sum the losses of the micro-batches and divide by the number of targets in the whole step, over all ranks"
        return [_finding(evidence, text, counts, hint)]
    return _over_ranks(evidence)


def shares(evidence: Evidence) -> Rows:
    """Return how many targets of this rank's step count, and what the loss of each was multiplied by.

    Nothing unless all targets have one weight, and the micro-batches are ragged or there is one, of a sum that the program
    divides.
    """
    parts = _parts(evidence)
    each = [part.factor / part.targets for part in parts]
    if not (len(parts) == 1 or (_are_ragged([part.targets for part in parts]) and _are_equal(each))):
        return {}
    return {_TARGETS: (0, sum(part.targets for part in parts)), _WEIGHT: (0, each[0])}


def _over_ranks(evidence: Evidence) -> list[Finding]:
    axes = frozenset({"dp", "cp"})
    group = along(evidence, axes)
    if not all(_TARGETS in peer.rows for peer in group):
        return []
    counts, weights = ([peer.rows[key][1] for peer in group] for key in (_TARGETS, _WEIGHT))
    if not _are_ragged(counts):
        return []
    if not _are_equal([weight * count for weight, count in zip(weights, counts, strict=True)]):
        return []
    text = (
        f"each rank of the {group_words(evidence, axes, group)} divides by its own number of targets, {_listed(counts)}, and "
        f"the ranks are averaged. One target weighs up to {max(counts) / min(counts):.3g} times as much as another"
    )
    hint = "divide by the number of targets of all ranks (all-reduced), times the number of ranks that average gradients"
    return [_finding(evidence, text, counts, hint)]


def _parts(evidence: Evidence) -> list[_Part]:
    """Return the micro-batches of a step; none where anything but one loss function went into each backward pass."""
    losses = evidence.of(LossCalls)
    roots = evidence.of(UsedGradients).differentiated
    calls = {call.backward: call for call in losses.losses if call.kind in ("cross_entropy", "nll_loss")}
    divided = len(roots) == 1 and all(call.reduction == "sum" for call in losses.losses)  # by the program itself
    if not (len(roots) > 1 or divided) or len(losses.losses) != len(roots) or set(calls) != set(range(len(roots))):
        return []
    found: list[_Part] = []
    for i, root in enumerate(roots):
        call = calls[i]
        count, value = call.number("valid"), call.number("value")
        if call.reduction not in ("mean", "sum") or not count > 0 or not math.isfinite(value) or value == 0:
            return []
        factor = root / value * (count if call.reduction == "sum" else 1.0)
        found.append(_Part(count, factor))
    return found


def _is_mean_of_means(parts: list[_Part]) -> bool:
    return _are_ragged([part.targets for part in parts]) and _are_equal([part.factor for part in parts])


def _are_ragged(counts: list[float]) -> bool:
    return len(counts) > 1 and max(counts) >= _RAGGED * min(counts)


def _are_equal(numbers: list[float]) -> bool:
    return max(numbers) - min(numbers) <= _EQUAL * max(map(abs, numbers))


def _listed(counts: list[float]) -> str:
    return ", ".join(f"{count:.0f}" for count in counts[:8]) + (" …" if len(counts) > 8 else "")


def _finding(evidence: Evidence, text: str, counts: list[float], hint: str) -> Finding:
    return evidence.found(
        text, "loss", next=hint, measured=max(counts) / min(counts), expected=1.0, floor=_RAGGED, kind="scalar"
    )
