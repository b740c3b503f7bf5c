"""A scheduler that is made for an optimizer is stepped, and it changes the rates of an optimizer that steps.

Relations: consider an optimizer with a torch scheduler that was never stepped. It does not update at bitwise the same rate at
four or more audited steps in a row and over the end of an epoch, if that rate is at most half of the scheduler's base rate (the
start of a warm-up), or over the ends of three epochs. Tolerance none. Judged if a trainer reports its epochs. Nor is a
scheduler stepped ten times while its own optimizer never steps and another one, with groups of its own, updates the same
parameters: the optimizer was wrapped, loaded or made again after the scheduler. Reported as warnings.
Usually caused by manual optimization, in which the trainer steps no scheduler (Lightning), or by a loop that was copied without
the call. A scheduler that is stepped once an epoch cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import Schedules, UpdateCounts, UsedGroups

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "schedules", "updates"})
STAGE = "rate"
_LOOKS, _EPOCHS, _WARMING = 4, 3, 0.5
_ASTRAY = 10  # steps of a scheduler


def check(evidence: Evidence) -> list[Finding]:
    """Find the first optimizer whose scheduler rests."""
    used = evidence.of(UsedGroups)
    astray = _astray(evidence)
    if astray:
        return astray
    epochs = used.progress.epochs
    if len(used.bases) != len(used.rates) or not evidence.of(UpdateCounts).updates or not epochs:
        return []
    for i, (base, rate) in enumerate(zip(used.bases, used.rates, strict=True)):
        streak = evidence.streak("rate", str(i))
        enough = epochs >= _EPOCHS or rate <= _WARMING * base.rate
        if not base.unstepped or streak is None or streak.count < _LOOKS or not enough:
            continue
        passed = evidence.ordinal - streak.since
        text = (
            f"parameter group {i} has been updated at the rate {rate:.4g} for {passed} steps, over the end of {epochs} "
            f"epoch{'s' * (epochs > 1)}. A scheduler was made for its optimizer (base rate {base.rate:.4g}) and was not stepped"
        )
        hint = "call scheduler.step() after optimizer.step(); in manual optimization the trainer does not"
        return [evidence.found(text, "lr", next=hint, measured=rate, expected="a rate that its scheduler moves", kind="scalar")]
    return []


def _astray(evidence: Evidence) -> list[Finding]:
    """Find the first scheduler that moves the rates of an optimizer which does not step."""
    used = evidence.of(UsedGroups)
    schedule = next((s for s in evidence.of(Schedules).schedules if s.astray >= _ASTRAY), None)
    if schedule is None or not evidence.of(UpdateCounts).updates:
        return []
    text = (
        f"{schedule.kind} has been stepped {schedule.astray} times and does not reach the optimizer that steps. It moves the "
        f"rates of another one, which holds the same parameters and never steps"
    )
    hint = "make the scheduler from the optimizer that steps, after that was wrapped, loaded or made anew"
    rate = used.rates[0] if used.rates else 0.0
    expected = "a rate that its scheduler moves"
    return [evidence.found(text, "lr", next=hint, measured=rate, expected=expected, kind="scalar")]
