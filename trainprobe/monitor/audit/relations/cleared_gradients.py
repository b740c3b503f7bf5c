"""Gradients are empty before the first backward pass of a step, and an update uses all gradients since the one before.

Relation: when backward begins, no parameter holds a gradient that the optimizer has already used. Tolerance none: the gradient
is bit-equal to the used one. If the step before was not audited, or an optimizer ran backward within its step, it is enough
that a gradient is there although every audited step updates.
If all gradients of the model are cleared after a backward pass, an update or a write to the weights came between, or no
backward pass follows. A loop may try a batch and drop it, so this is reported at the second audited step in a row, or as a
warning if three steps before had none. It is not judged if the update is given other tensors than the last pass left: the
program then accumulates in buffers of its own, and what was cleared had been used. (Copying such buffers into the gradients'
memory looks like a pass.) When the optimizer steps, `fully_shard` holds no gradient that still waits for its reduction.
Usually caused by a missing `zero_grad`, by one on the wrong model or optimizer, or by one inside the loop over micro-batches.
Another cause is `set_requires_gradient_sync` that is off for the last micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import Backwards, KeptGradients, UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"backward_starts", "gradient_use", "left_gradients", "updates", "waiting_gradients"})
STAGE = "backward"
_STEADY = 3


@dataclass(frozen=True, slots=True)
class UnreducedGradients:
    """Gradients that `fully_shard` had not reduced when the optimizer stepped."""

    names: tuple[str, ...] = ()
    """Their parameters."""


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that the optimizer has used already."""
    counts = evidence.of(UpdateCounts)
    before = evidence.before
    if evidence.of(UsedGradients).discarded and counts.updates:
        again = before is not None and before.of(UsedGradients).discarded > 0
        return [_discarded(evidence, again)] if again or evidence.remembered("cleared_gradients", 0) >= _STEADY else []
    if evidence.of(UnreducedGradients).names and counts.updates:
        return [_waiting(evidence)]
    left = evidence.of(KeptGradients).left
    if not left or before is None or not (before.of(UpdateCounts).updates and counts.updates):
        return []
    if evidence.follows and not before.of(UsedGradients).closure:
        left = {name: seen for name, seen in left.items() if before.tensors.checksum(name, "grad") == seen[0]}
    if not left:
        return []
    names = list(left)
    text = (
        f"gradients are not empty before backward. The optimizer has used that of "
        f"{and_more(names, len(evidence.model.parameters))} "
        f"(norm {left[names[0]][1]:.6g}), and this step's gradient is added to it"
    )
    hint = "call optimizer.zero_grad() once for every optimizer step"
    return [evidence.found(text, names, "grad", next=hint, measured=left[names[0]][1], expected=0.0, severity="error")]


def remember(evidence: Evidence) -> int:
    """Return how many audited steps in a row have updated with all gradients that came."""
    kept = evidence.of(UpdateCounts).updates and not evidence.of(UsedGradients).discarded
    return evidence.remembered("cleared_gradients", 0) + 1 if kept else 0


def _discarded(evidence: Evidence, again: bool) -> Finding:
    lost, passes = evidence.of(UsedGradients).discarded, evidence.of(Backwards).count
    text = (
        f"the gradients of {lost} of {passes} backward passes were cleared before an update used them"
        f"{', as at the audited step before' * again}. The update is that of the others alone"
    )
    hint = "call zero_grad() once for every optimizer step, outside the loop over micro-batches"
    return evidence.found(
        text,
        evidence.model.parameters[0].name if evidence.model.parameters else "",
        "grad",
        next=hint,
        measured=float(lost),
        expected=0.0,
        severity="error" if again else "warning",
    )


def _waiting(evidence: Evidence) -> Finding:
    names = list(evidence.of(UnreducedGradients).names)
    text = (
        f"the optimizer stepped while the gradient of {and_more(names, len(evidence.model.parameters))} waited to be reduced: "
        "fully_shard adds it to that of the next step"
    )
    hint = "call set_requires_gradient_sync(True) before the last micro-batch of each step"
    return evidence.found(
        text, names, "grad", next=hint, measured="not reduced", expected="reduced before the update", severity="error"
    )
