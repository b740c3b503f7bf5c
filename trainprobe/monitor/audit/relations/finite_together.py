"""Loss and gradients are finite together.

Relation: where the reported loss is finite, so is every gradient, and the other way round. Tolerance none. A loss scale above
1 may drive gradients to infinity while the loss is finite; that is not judged.
Usually caused by a NaN that a branch or `nan_to_num` hides from the loss, or by an overflow in the backward pass alone.
"""

from __future__ import annotations

import math

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host"})
EVERY = 10
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find a finite loss with a gradient that is not, or the other way round."""
    loss, scale = scalar(evidence.scalars, "loss"), scalar(evidence.scalars, "loss scale")
    slot = "grad_unclipped" if any(evidence.tensors.with_slot("grad_unclipped")) else "grad"
    names = list(evidence.tensors.with_slot(slot))
    if loss is None or not names or (scale is not None and scale > 1):
        return []
    bad = [name for name in names if not math.isfinite(evidence.tensors.number(name, slot, "norm"))]
    if math.isfinite(loss) and bad:
        text = f"the loss is finite ({loss:.6g}) and the gradient of {bad[0]} is not ({len(bad)} of {len(names)} gradients)"
        return [evidence.finding("finite_together", text, bad[0], slot, measured="not finite", expected="finite")]
    if not math.isfinite(loss) and not bad:
        text = (
            f"the loss is {loss} and all {len(names)} gradients are finite: the reported loss is not the "
            "one that was differentiated"
        )
        return [evidence.finding("finite_together", text, "loss", measured=str(loss), expected="finite", kind="scalar")]
    return []
