"""A warm-up ends well before the training does.

Relation, where a trainer tells how many updates it is to make, and a scheduler of torch was made: once half of them are made,
the rate of no parameter group is below a tenth of the one that its schedule multiplies, if it was never higher at an audited
step. Reported as a warning.
Usually caused by a warm-up that is longer than the training: its steps were taken from the recipe of a longer one, or counted
in micro-batches or samples. A schedule that has come down again was higher before, and cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts, UsedGroups

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "updates"})
STAGE = "rate"
_PART, _LOW = 0.5, 0.1


def check(evidence: Evidence) -> list[Finding]:
    """Find the first group whose rate is still far from its base."""
    used = evidence.of(UsedGroups)
    peaks = evidence.history.peaks
    planned = used.progress.updates
    if (
        not 0 < _PART * planned <= evidence.step
        or not len(used.bases) == len(used.rates) == len(peaks)
        or not evidence.of(UpdateCounts).updates
    ):
        return []
    for i, (base, rate, peak) in enumerate(zip(used.bases, used.rates, peaks, strict=True)):
        if not 0 <= rate < _LOW * base.rate or peak > rate:
            continue
        text = (
            f"the learning rate of parameter group {i} is {rate:.4g} at step {evidence.step} of {planned}, "
            f"{rate / base.rate:.2g} of the {base.rate:.4g} that its schedule multiplies. It was never higher: the warm-up "
            "does not end in this training"
        )
        hint = "give the scheduler fewer steps of warm-up, counted in updates, and all steps of this training"
        return [
            evidence.found(
                text, "lr", next=hint, measured=rate, expected=f"at least {_LOW * base.rate:.4g}", floor=_LOW, kind="scalar"
            )
        ]
    return []
