"""The optimizer owns every live trainable parameter.

Relation: the set of parameter objects that the optimizers step contains every parameter of the model that requires a
gradient. Tolerance none. One of which an optimizer holds a copy of its shape and another dtype has a master weight; where an
optimizer holds none of them and nothing that looks like them, nothing can be told. Usually caused by parameters that were
replaced (moved, cast, resized, wrapped) after the optimizer was made (accelerate issue 2665), or by a part of the model that
was left out of the parameter groups.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more

COST = frozenset({"host"})
EVERY = 10
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find trainable parameters that no optimizer steps."""
    trainable = [p for p in evidence.model.parameters if p.trainable]
    lost = [p for p in trainable if p.owned is False and p.name not in evidence.mastered]
    strays = set(evidence.model.strays)
    stale = [p for p in lost if (p.shape, p.dtype) in strays]
    if not lost or not evidence.facts.updates or (len(lost) == len(trainable) and not stale):
        return []
    first = (stale or lost)[0]
    names = [p.name for p in (stale or lost)]
    held = len(trainable) - len(lost)
    text = f"the optimizer owns {held} of {len(trainable)} live trainable parameters: {and_more(names)} never moves"
    if stale:
        text += "; it holds other tensors of the same shapes, so the parameters were replaced after it was made"
    return [
        evidence.finding(
            "ownership",
            text,
            first.name,
            measured=float(held),
            expected=float(len(trainable)),
            next="make the optimizer after the model has its final dtype, device and wrappers, from model.parameters()",
        )
    ]
