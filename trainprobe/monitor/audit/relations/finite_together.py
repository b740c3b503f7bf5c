"""Loss and gradients are finite together.

Relation: where the reported loss is finite, so is every gradient, and the other way round. Tolerance none. A loss scale above
1 may drive gradients to infinity while the loss is finite; that is not judged. A gradient that arrives with a NaN or an
infinity keeps it until it is used (seen at the steps at which `reduced_gradients` looks at gradients). The mean over targets
that are all ignored is NaN and has a gradient of zeros: `loss_inputs` reports that.
Usually caused by a NaN that a branch or `nan_to_num` hides from the loss, or by an overflow in the backward pass alone.
"""

from __future__ import annotations

import math

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import Reductions
from trainprobe.monitor.audit.relations.loss_inputs import mean_of_nothing
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})  # gradients before their reduction are judged where they are looked at anyway
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find a finite loss with a gradient that is not, or the other way round."""
    return _hidden(evidence) or _differs_over_ranks(evidence)


def _hidden(evidence: Evidence) -> list[Finding]:
    reductions = evidence.of(Reductions).reductions
    lost = [r for r in reductions if not math.isfinite(r.arrived) and math.isfinite(r.used)]
    if not lost:
        return []
    text = (
        f"the gradient that backward gave of {and_more([r.name for r in lost], len(reductions))} was not "
        "finite, and the one that is used is. Something replaced what was not finite, and no scaler can see it"
    )
    hint = (
        "leave NaN and infinities in the gradients: a loss scaler skips such a step, and the rule `nonfinite` names its origin"
    )
    return [evidence.found(text, [r.name for r in lost], "grad", next=hint, measured="not finite", expected="finite")]


def _differs_over_ranks(evidence: Evidence) -> list[Finding]:
    loss, scale = scalar(evidence.scalars, "loss"), scalar(evidence.scalars, "loss scale")
    slot = "grad_unclipped" if any(evidence.tensors.with_slot("grad_unclipped")) else "grad"
    names = list(evidence.tensors.with_slot(slot))
    if loss is None or not names or (scale is not None and scale > 1):
        return []
    bad = [name for name in names if not math.isfinite(evidence.tensors.number(name, slot, "norm"))]
    if math.isfinite(loss) and bad:
        text = f"the loss is finite ({loss:.6g}) and the gradient of {bad[0]} is not ({len(bad)} of {len(names)} gradients)"
        return [evidence.found(text, bad[0], slot, measured="not finite", expected="finite", severity="error")]
    if not math.isfinite(loss) and not bad and mean_of_nothing(evidence) is None:
        text = (
            f"the loss is {loss} and all {len(names)} gradients are finite: the reported loss is not the "
            "one that was differentiated"
        )
        return [evidence.found(text, "loss", measured=str(loss), expected="finite", kind="scalar", severity="error")]
    return []
