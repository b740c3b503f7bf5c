"""An update uses the sum of its backward passes, all computed at the same weights.

Relation: if a backward pass adds to an existing gradient and the update uses the sum, no optimizer has stepped since the pass
of the older part, and no program has written to most of the weights. Tolerance none; an older part that is zero does not count.
The update does not use the unchanged gradient of an earlier pass if a later pass of the step left a different one. Reported as
a warning, since either may be intended.
Usually caused by an output that is not detached, so that the loss of one network leaves its gradient in another, which then
adds its own (a generator and its discriminator). Other causes are gradients of two tasks that were exchanged, and an ascent
step (sharpness-aware minimization, extragradient) whose gradient is not cleared before the second pass. Accumulated
micro-batches cannot violate this, nor can networks that are updated in turn and cleared before their own backward pass.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import KeptGradients, UsedGradients

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"gradient_use", "left_gradients"})
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find gradients that were added up over different weights."""
    overwritten = evidence.of(UsedGradients).overwritten
    if overwritten:
        text = (
            f"the update of {and_more(overwritten, len(evidence.model.parameters))} used the gradient of an earlier "
            "backward pass alone. What a later one of the same step brought was replaced by it, and is lost"
        )
        hint = "add the gradients of the passes up: p.grad = p.grad + kept"
        return [evidence.found(text, overwritten, "grad", next=hint, expected="the sum of the passes")]
    mixed = evidence.of(UsedGradients).mixed
    names = [name for name in mixed if name not in evidence.of(KeptGradients).left]  # `cleared_gradients` reports those
    if not names:
        return []
    text = (
        f"the update of {and_more(names, len(evidence.model.parameters))} used a gradient that adds up backward passes from "
        f"before and after weights were changed. The older one has norm {mixed[names[0]]:.6g} and belongs to another loss or "
        "other weights"
    )
    hint = "detach what one network hands to the loss of another, or call zero_grad() before the backward pass of this update"
    return [evidence.found(text, names, "grad", next=hint, measured=mixed[names[0]], expected=0.0)]
