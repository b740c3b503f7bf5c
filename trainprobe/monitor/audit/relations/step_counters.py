"""A gradient is used by one update, and step counters advance by one in each.

Relation: no parameter is stepped again while its gradient is the tensor, unchanged, that the update before used; an
optimizer's `step` of every parameter with a gradient is, after the updates of a step, larger by their number; parameters that
were stepped together count the same. Counters are not compared with the step before where optimizers take turns over the same
parameters, as each has its own. Tolerance zero.
Usually caused by `step` that is called in two places, by two optimizers that hold the same parameter, or by counters that were
lost or loaded twice (bias correction is then wrong).
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"gradient_use", "updates"})
STAGE = "update"


def check(evidence: Evidence) -> list[Finding]:
    """Find counters that jump or stand still."""
    seen = evidence.tensors
    twice = evidence.of(UsedGradients).twice
    if twice:
        text = f"{and_more(list(twice))} was stepped twice with the same gradient, in step {evidence.step}"
        hint = "call step() once for each backward pass, and let one optimizer hold each parameter"
        return [evidence.found(text, twice, "grad", next=hint, measured=2.0, expected=1.0, severity="error")]
    if not evidence.of(UpdateCounts).once:
        return []
    wrong: list[tuple[str, float, float]] = []
    for name in seen.with_slot("step_after"):
        if (name, "grad") not in seen:
            continue
        before = seen.number(name, "step", "mean") if (name, "step") in seen else 0.0
        after = seen.number(name, "step_after", "mean")
        if after != before + 1:
            wrong.append((name, before, after))
    if wrong:
        name, before, after = wrong[0]
        text = f"the step counter of {and_more([n for n, _, _ in wrong])} went from {before:g} to {after:g} in one update"
        return [
            evidence.found(
                text, name, "step", measured=after, expected=before + 1, severity="error", names=[n for n, _, _ in wrong]
            )
        ]
    return _between(evidence)


def _between(evidence: Evidence) -> list[Finding]:
    """Compare with the audited step before: as many updates as steps can have passed, and none backwards."""
    before = evidence.before
    if before is None or evidence.of(UpdateCounts).in_turns:
        return []
    for name in evidence.tensors.with_slot("step"):
        if (name, "step_after") not in before.tensors:
            continue
        was, now = before.tensors.number(name, "step_after", "mean"), evidence.tensors.number(name, "step", "mean")
        if now < was:
            text = f"the step counter of {name} fell from {was:g} to {now:g} since step {before.step}"
            return [evidence.found(text, name, "step", measured=now, expected=was, severity="error")]
    return []
