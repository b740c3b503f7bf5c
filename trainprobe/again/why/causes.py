"""Ranks what may be wrong with a run: exact evidence first, then by when it began; no model guesses.

Exact is what holds in every correct training and did not hold: a relation of the audit, bits that differ between repeats or
replicas, a setting that differs from that of another run. A symptom is what left its own past, such as a spike or a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainprobe.engine.core.findings import in_folder, place_in_words, ranks_of
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import counted, numbered
from trainprobe.monitor.audit.relations import relation_names
from trainprobe.monitor.findings import OWN

MOST = 5  # causes that are told
_FOLLOWS = 10  # steps within which a symptom may follow a cause
_SHOWN = 3  # consequences that are named
_NOT_FINITE = frozenset({"nonfinite", "loss_scale"})
_EXACT = frozenset({"repeat", "fleet_replicas", "frozen"})


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that may be wrong. step: the first at which it was seen. exact: see the module text.

    evidence: sentences for it. against: sentences that speak against it. next: what to do, or the command to run.
    """

    what: str
    sentence: str
    next: str
    step: int | None = None
    exact: bool = True
    evidence: list[str] = field(default_factory=list[str])
    against: list[str] = field(default_factory=list[str])
    finding: Finding | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the cause as JSON values, without the finding, which `trainprobe judge --json` has."""
        names = ("what", "sentence", "step", "exact", "evidence", "against", "next")
        return {name: getattr(self, name) for name in names}


def about_training(findings: Sequence[Finding]) -> list[Finding]:
    """Return the warnings and errors about the training itself, in their order."""
    return [finding for finding in findings if finding.severity != "info" and finding.rule not in OWN]


def is_exact(finding: Finding) -> bool:
    """Tell whether a finding rests on what holds in every correct training."""
    return finding.rule in _EXACT or finding.rule in relation_names()


def ranked(findings: Sequence[Finding], folder: str, also_good: Sequence[Finding] = ()) -> list[Cause]:
    """Return the causes that findings come to, the likeliest first.

    findings: of one run, causes before consequences. folder: the run's, for commands. also_good: findings of a good run; what
    is among them too is no cause, and is left out.
    """
    good = {(finding.rule, _name(finding)) for finding in about_training(also_good)}
    found = [finding for finding in about_training(findings) if (finding.rule, _name(finding)) not in good]
    nan = min((f.step for f in found if f.rule in _NOT_FINITE and f.step is not None), default=None)
    behind = [f for f in found if is_exact(f) and nan is not None and f.step is not None and f.step > nan]
    causes = [_cause(group, folder) for group in _one_a_rule([f for f in found if is_exact(f) and f not in behind])]
    left = _attached(causes, [f for f in found if not is_exact(f)])
    late = [_cause(group, folder) for group in _one_a_rule(behind)]
    for cause in late:
        cause.against.append(f"values were not finite from step {nan} on, which breaks what is behind them")
    return [*causes, *(_cause(group, folder) for group in _one_a_rule(left)), *late]


def _one_a_rule(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return the findings of each rule, symptoms of one step; in the order of the first of each."""
    groups: dict[tuple[str, int | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, None if is_exact(finding) else finding.step), []).append(finding)
    return list(groups.values())


def _attached(causes: Sequence[Cause], symptoms: Sequence[Finding]) -> list[Finding]:
    """Say of each exact cause what may follow from it and what came before it; return the symptoms that follow from none."""
    left = list(symptoms)
    for cause in causes:
        follow = [symptom for symptom in left if _may_follow(symptom, cause)]
        left = [symptom for symptom in left if symptom not in follow]
        cause.evidence.extend(f"then: {_short(symptom)}" for symptom in follow[:_SHOWN])
        if len(follow) > _SHOWN:
            cause.evidence.append(f"then {counted(len(follow) - _SHOWN, 'further finding')}")
    for cause in causes:
        before = next((s for s in left if s.step is not None and cause.step is not None and s.step < cause.step), None)
        if before is not None:
            cause.against.append(f"before it was seen: {_short(before)}")
    return left


def _may_follow(symptom: Finding, cause: Cause) -> bool:
    if symptom.step is None or cause.step is None or cause.finding is None:
        return False
    last = max(cause.step, cause.finding.last_step or 0)
    return cause.step <= symptom.step <= last + _FOLLOWS


def _cause(group: Sequence[Finding], folder: str) -> Cause:
    first, others = group[0], group[1:]
    exact = is_exact(first)
    where = place_in_words(first)
    evidence = [f"seen at {where}" if first.step is not None else f"seen on {where}"] if where else []
    if first.measured is not None and first.expected is not None:
        evidence.append(f"measured {_number(first.measured)}, expected {_number(first.expected)}")
    if others:
        names = [name for name in dict.fromkeys(map(_name, others)) if name]
        more = f", such as {', '.join(names[:_SHOWN])}" if names else ""
        evidence.append(f"the same rule found {counted(len(others), 'further place')}{more}")
    against = [] if exact else ["a symptom: it shows where something left its own past, not what made it do so"]
    world = first.place.world_size if first.place is not None else 1
    ranks = ranks_of(first)
    if 0 < len(ranks) < world and exact:
        evidence.append(f"of {world} ranks only {numbered('rank', ranks)} reported it")
    following = in_folder(first, folder).next or ""
    return Cause(first.rule, first.message, _next(first, following, folder), first.step, exact, evidence, against, first)


def _next(finding: Finding, following: str, folder: str) -> str:
    if "`" in following or (following and is_exact(finding)):  # what a relation says to do needs no values of the step
        return following
    if finding.step is None:
        command = f"`trainprobe report {folder}`"
    else:
        command = f"record the step whole: `{{record: mix, summary: both, step: [{finding.step}]}}`, then `trainprobe show`"
    return f"{following}; {command}" if following else command


def _short(finding: Finding) -> str:
    name = _name(finding)
    return f"{finding.rule}{f' of {name}' if name else ''} ({place_in_words(finding)})"


def _name(finding: Finding) -> str:
    return finding.site.name if finding.site is not None else ""


def _number(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"
