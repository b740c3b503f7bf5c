"""A schedule moves the rates of all parameter groups of an optimizer.

Relation: where no scheduler of torch was made for an optimizer, and the rate of one of its parameter groups has been another
one at each of four or more audited steps in a row, no other group has stood at one rate above 0, to the bit, since the first
audited step. Reported as a warning: a group may be left out of the schedule on purpose.
Usually caused by a loop over the groups that sets the rate behind it, so that only the last group follows the schedule, or by
`param_groups[0]["lr"] = …` where there are several. A schedule that multiplies all rates by the same factor cannot violate
this; what is set once an epoch is not judged, and neither are schedulers of torch, which declare a rate for each group.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts, UsedGroups

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "updates"})
STAGE = "rate"
_LOOKS = 4


def check(evidence: Evidence) -> list[Finding]:
    """Find the first group that a schedule leaves out."""
    used = evidence.of(UsedGroups)
    moves = remember(evidence)
    if (
        len(used.bases) != len(used.rates)
        or not evidence.of(UpdateCounts).updates
        or any(base.rate == base.rate for base in used.bases)
    ):
        return []
    scheduled = {base.optimizer: i for i, base in enumerate(used.bases) if moves[i] + 1 >= _LOOKS}
    for i, base in enumerate(used.bases):
        streak, other = evidence.streak("rate", str(i)), scheduled.get(base.optimizer)
        if streak is None or streak.count < _LOOKS or streak.since > _first(evidence) or other is None or not used.rates[i] > 0:
            continue
        text = (
            f"the learning rate of parameter group {i} has been {used.rates[i]:.4g} since the first audited step. That of "
            f"group {other} of the same optimizer changes at every step ({used.rates[other]:.4g} now)"
        )
        hint = "set the rate of every group in optimizer.param_groups, inside the loop over the groups"
        return [
            evidence.found(
                text,
                "lr",
                next=hint,
                measured=used.rates[i],
                expected="another rate at each audited step",
                kind="scalar",
                names=sorted(used.groups[i].names) if len(used.groups) == len(used.rates) else (),
            )
        ]
    return []


def remember(evidence: Evidence) -> tuple[int, ...]:
    """Return at how many audited steps in a row the rate of each group was another one than at the one before."""
    used = evidence.of(UsedGroups)
    before = evidence.before
    known: tuple[int, ...] = evidence.remembered("rates_together", ())
    if not evidence.of(UpdateCounts).updates:
        return known
    was = before.of(UsedGroups).rates if before is not None else ()
    if len(was) != len(used.rates) or len(known) != len(used.rates):
        return (0,) * len(used.rates)
    return tuple(n + 1 if now != then else 0 for n, now, then in zip(known, used.rates, was, strict=True))


def _first(evidence: Evidence) -> int:
    """Return the first step at which any rate that is in use now was seen to stand."""
    return min((s.since for (kind, _), s in evidence.history.streaks.items() if kind == "rate"), default=evidence.ordinal)
