"""An update is what the optimizer's rule gives for this gradient and state, within its noise floor.

Relation: for torch's Adam, AdamW and SGD, carried out in whatever way (loops, foreach, fused), each element of a parameter
after the update is p' = rule(p, g, state), worked out again in float64 by `monitor.audit.observers.update_rules`. Floor,
element by element: 8 ε |p'| for the rounding of the parameter, 1e-4 |p' - p| for that of the change (0.1 where parameter or
gradient have 16 bits), and 8 ε times the change that momentum and gradient would make if they did not cancel, as what is
left of them is rounded as they were. Of a flat buffer that an optimizer steps, the parameter is named in which the worst
element lies. Up to one million elements are run again at a time; parameters take turns. On a step that is skipped nothing
is judged. Sources of the rules stand there.
Usually caused by a kernel that leaves a part out or depends on the layout, by state that belongs to another parameter or
shard, or by something that writes to weights within the update.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import Reruns, UpdateCounts

COST = frozenset({"rerun"})
OBSERVERS = frozenset({"update_rules", "updates"})
STAGE = "update"


def check(evidence: Evidence) -> list[Finding]:
    """Find updates that are not what the rule gives."""
    reruns = evidence.of(Reruns).reruns
    wrong = [rerun for rerun in reruns if not rerun.worst <= 1.0 and rerun.change == rerun.change]
    if not wrong or not evidence.of(UpdateCounts).once:
        return []
    first = max(wrong, key=lambda rerun: rerun.worst)
    named = [first.name, *(rerun.name for rerun in wrong if rerun is not first)]
    text = (
        f"the update of {and_more(named, len(reruns))} is not what the optimizer's rule gives. It changed by norm "
        f"{first.moved:.6g}, by the rule {first.change:.6g}; the worst element is off by {first.worst:.3g} times its floor"
    )
    hint = "step this parameter with foreach=False, fused=False and compare; look for other writes to it"
    return [
        evidence.found(
            text,
            first.name,
            "update",
            next=hint,
            measured=first.moved,
            expected=first.change,
            floor=1.0,
            severity="error",
            names=named,
        )
    ]
