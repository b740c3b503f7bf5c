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
from trainprobe.monitor.audit.messages import key_of

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
    if len({peer.marks["trainable"] for peer in group}) < 2:
        return []
    trained = [p.name for p in evidence.model.parameters if p.trainable]
    frozen = {name: [peer.rank for peer in group if key_of(name, "frozen") in peer.rows] for name in trained}
    apart = [name for name, ranks in frozen.items() if ranks]
    if not apart:
        return []  # ranks with other parameters: experts, stages
    ranks = ", ".join(map(str, frozen[apart[0]]))
    text = (
        f"the set of trainable parameters differs in the {group_words(evidence, axes, group)}: {and_more(apart, len(trained))} "
        f"is trained on rank {evidence.place.rank} and not on rank {ranks}"
    )
    return [evidence.finding("trainable_set", text, apart[0], measured="not trainable", expected="equal on all ranks")]
