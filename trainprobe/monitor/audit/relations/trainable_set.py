"""The set of trainable parameters is the declared one.

Relation: the parameters that require a gradient are those that the plan names (`trainable`), or, without that, those that did
at set-up; it is the same on all ranks that hold the same parameters. Tolerance none.
Usually caused by a `requires_grad_(False)` that reached too far, by adapters that were merged or reloaded, or by a wrapper
that was applied on some ranks only.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.engine.selection import Names
from trainprobe.monitor.audit.evidence import Evidence, along, and_more, group_words

COST = frozenset({"host"})
EVERY = 10
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that are trainable and should not be, or the other way round."""
    if evidence.plan.trainable is not None:
        declared = Names(evidence.plan.trainable)
        wanted = {p.name: p.name in declared for p in evidence.model.parameters}
    else:
        wanted = {p.name: p.trainable for p in evidence.facts.set_up.parameters}
    wrong = [p for p in evidence.model.parameters if wanted.get(p.name, p.trainable) != p.trainable]
    if wrong:
        what = "is trainable and should not be" if wrong[0].trainable else "should be trainable and is not"
        text = f"{and_more([p.name for p in wrong], len(wanted))} {what}"
        return [
            evidence.finding(
                "trainable_set", text, wrong[0].name, measured=str(wrong[0].trainable), expected=str(not wrong[0].trainable)
            )
        ]
    axes = frozenset({"dp", "cp", "tp"})
    group = along(evidence, axes)
    if len({peer.marks["trainable"] for peer in group}) > 1:
        return [
            evidence.finding(
                "trainable_set", f"the set of trainable parameters differs in the {group_words(evidence, axes, group)}"
            )
        ]
    return []
