"""The set of trainable parameters is the declared one.

Relation: the parameters that require a gradient are those that the plan names (`trainable`); it is the same on all ranks that
hold the same parameters. Where the plan names none, those of the set-up go on to be trained, and one that begins to require a
gradient is held by an optimizer: that is gradual unfreezing. One that ceases to with all others of its parameter group
(adversaries take turns) is not judged. As a program may freeze on purpose, what is not declared is reported as a warning.
Tolerance none.
Usually caused by a `requires_grad_(False)` that reached too far, by adapters that were merged or reloaded, or by a wrapper that
was applied on some ranks only.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.engine.plan.selection import Names
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.facts.model import ParameterFact
from trainprobe.monitor.audit.facts.updates import UsedGroups
from trainprobe.monitor.audit.messages import key_of

COST = frozenset({"host"})
OBSERVERS = frozenset({"gradient_use", "parameter_groups"})
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that are trained and should not be, or the other way round."""
    return _not_declared(evidence) if evidence.plan.trainable is not None else _changed(evidence) or _over_ranks(evidence)


def _not_declared(evidence: Evidence) -> list[Finding]:
    declared = Names(evidence.plan.trainable or ())
    wrong = [p for p in evidence.model.parameters if (p.name in declared) != p.trainable]
    if not wrong:
        return _over_ranks(evidence)
    what = "requires a gradient and is not among" if wrong[0].trainable else "requires no gradient and is among"
    return [_finding(evidence, wrong, f"{what} the parameters that the plan's `trainable` names", "error")]


def _changed(evidence: Evidence) -> list[Finding]:
    """Find what is trained otherwise than at set-up."""
    was = {p.name: p.trainable for p in evidence.set_up.parameters}
    others = [p for p in evidence.model.parameters if was.get(p.name, p.trainable) != p.trainable]
    thawed = [p for p in others if p.trainable and p.owned is False and p.name not in evidence.mastered]
    frozen = [
        p
        for p in others
        if not p.trainable and p.name not in evidence.of(UsedGradients).reached and not _takes_turns(evidence, p)
    ]
    if thawed:
        text = "requires a gradient, which it did not at set-up, and no optimizer holds it: it does not move"
        return [_finding(evidence, thawed, text, "warning", "add it to the optimizer with add_param_group")]
    if not frozen:
        return []
    return [_finding(evidence, frozen, "required a gradient at set-up and no longer does", "warning")]


def _takes_turns(evidence: Evidence, parameter: ParameterFact) -> bool:
    """Tell whether a whole parameter group rests with a parameter, while another is trained."""
    used = evidence.of(UsedGroups)
    trained = {p.name for p in evidence.model.parameters if p.trainable}
    mine = [group for group in used.groups if parameter.name in group.names]
    return bool(mine) and not any(group.names & trained for group in mine) and any(g.names & trained for g in used.groups)


def _finding(evidence: Evidence, wrong: list[ParameterFact], text: str, severity: str, hint: str = "") -> Finding:
    first, of = wrong[0], len(evidence.model.parameters)
    hint = hint or "look for requires_grad_; if this is intended, name what is trained: `audit: {trainable: [...]}`"
    measured, expected = ("requires a gradient", "frozen") if first.trainable else ("frozen", "requires a gradient")
    text = f"{and_more([p.name for p in wrong], of)} {text}"
    return evidence.found(
        text, first.name, next=hint, measured=measured, expected=expected, severity=severity, names=[p.name for p in wrong]
    )


def _over_ranks(evidence: Evidence) -> list[Finding]:
    axes = frozenset({"dp", "cp", "tp"})
    group = along(evidence, axes)
    if len({peer.marks["trainable"] for peer in group}) < 2:
        return []
    trained = [p.name for p in evidence.model.parameters if p.trainable]
    frozen = {name: [peer.rank for peer in group if key_of(name, "frozen") in peer.rows] for name in trained}
    differing = [name for name, ranks in frozen.items() if ranks]
    if not differing:
        return []  # ranks with other parameters: experts, stages
    ranks = ", ".join(map(str, frozen[differing[0]]))
    text = (
        f"the set of trainable parameters differs in the {group_words(evidence, axes, group)}: "
        f"{and_more(differing, len(trained))} is trained on rank {evidence.place.rank} and not on rank {ranks}"
    )
    return [evidence.found(text, differing, measured="not trainable", expected="equal on all ranks", severity="error")]
