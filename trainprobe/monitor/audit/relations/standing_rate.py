"""A learning rate does not stay constant far below its earlier value while the training continues.

Relation: no parameter group is updated at bitwise the same rate at four or more audited steps in a row that span 20 steps or
more, if that rate is 0 or at most 1e-3 of the group's largest rate at an earlier audited step. Nor are all groups updated at
the rate 0 for 60 steps from the first audited step. Reported as a warning.
Usually caused by a scheduler whose number of steps is too small (counted before accumulation, for one epoch, or for one rank
of several), so that the rest of the training hardly moves, or by one that is stepped too often. A rate that never rises is
caused by a schedule with an integer division, or one that is never stepped. A warm-up cannot violate this: its rate rises from
0 and was never higher. Nor can a schedule that ends with the training, or one that ends at a tenth or a hundredth.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts, UsedGroups

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "updates"})
STAGE = "rate"
_LOOKS, _SPAN, _FAR = 4, 20, 1e-3
_NEVER_ROSE = 60  # steps at the rate 0 behind which no warm-up is expected any more


def check(evidence: Evidence) -> list[Finding]:
    """Find the first group whose rate has come to its end early."""
    used = evidence.of(UsedGroups)
    peaks = evidence.history.peaks
    if len(peaks) != len(used.rates) or not evidence.of(UpdateCounts).updates:
        return []
    if used.rates and not any(used.rates) and not any(peaks):
        return _never_rose(evidence)
    for group, (rate, peak) in enumerate(zip(used.rates, peaks, strict=True)):
        streak = evidence.streak("rate", str(group))
        passed = 0 if streak is None else evidence.ordinal - streak.since
        if streak is None or streak.count < _LOOKS or passed < _SPAN or not 0 <= rate <= _FAR * peak or peak == 0:
            continue
        text = (
            f"parameter group {group} has been updated at the rate {rate:.4g} for {passed} steps, after {peak:.4g} before. The "
            "schedule has come to its end and the training goes on"
        )
        hint = "give the scheduler the number of its steps in the whole training, or step it less often"
        return [
            evidence.found(text, "lr", next=hint, measured=rate, expected=f"above {_FAR * peak:.4g}", floor=_FAR, kind="scalar")
        ]
    return []


def _never_rose(evidence: Evidence) -> list[Finding]:
    streak = evidence.streak("rate", "0")
    passed = 0 if streak is None else evidence.ordinal - streak.since
    if streak is None or streak.count < _LOOKS or passed < _NEVER_ROSE:
        return []
    text = f"the learning rate has been 0 at every audited step, for {passed} steps: the optimizer steps and nothing moves"
    hint = "look at the schedule: a division of whole numbers, a warm-up that is never stepped, or a rate that was given as 0"
    return [evidence.found(text, "lr", next=hint, measured=0.0, expected="above 0", kind="scalar")]
