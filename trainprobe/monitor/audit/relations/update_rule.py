"""An update follows the optimizer's rule for this gradient and state, within the rounding noise.

Relation: for torch's Adam, AdamW and SGD in every implementation (loops, foreach, fused), each element of a parameter after the
update is p' = rule(p, g, state), computed again in float64 by `monitor.audit.observers.update_rules`. Floor, for each element:
8 ε |p'| for the rounding of the parameter, 1e-4 |p' - p| for that of the change (0.1 if parameter or gradient have 16 bits),
and 8 ε times the change that momentum and gradient would make if they did not cancel, since their remainder is rounded as they
were. For a flat buffer, the parameter with the worst element is named. Up to one million elements are computed at a time;
parameters take turns. A skipped step is not judged. The sources of the rules are in the observer.
Usually caused by a kernel that omits a part or depends on the layout, by state of another parameter or shard, or by something
that writes to weights during the update.
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
