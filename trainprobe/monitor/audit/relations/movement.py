"""An update moves each parameter that has a gradient, and no other; every optimizer steps.

Relation: after an update with a learning rate above zero, the fingerprint of every stepped parameter with a non-zero gradient
has changed. Excepted are changes below the resolution of the dtype: lr · min(max|g|, 1) <= ε · max|w|. Excepted are also
optimizers with a stopping tolerance (L-BFGS), elements whose gradient changed its sign (Rprop), and the first step of SOAP,
which moves nothing. The rate of Prodigy is `d * lr`. A parameter without a gradient keeps its fingerprint. Tolerance zero. For
a parameter that is copied from a master weight of a different dtype, the same holds from one update to the next.
Without a loss scale, an optimizer that stepped at each of three or more audited steps steps when others do. If every step
updated, no eight audited steps in a row are without an update. What is not trained here but moved all the same (the moving
average of a student) continues to move, if it did at three audited steps or more.
Usually caused by an optimizer that holds other tensors, by a step that some ranks skipped, or by code beside the optimizer that
writes to weights.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import Backwards, UsedGradients
from trainprobe.monitor.audit.facts.updates import ParameterGroup, UpdateCounts, UsedGroups
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"backward_starts", "gradient_use", "parameter_groups", "updates"})
STEADY = 3
_STALLED = 8
STAGE = "update"
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that should have moved and did not, and the other way round."""
    gradients = evidence.of(UsedGradients)
    stuck, drawn, judged = _against_their_gradients(evidence)
    found: list[Finding] = []
    if stuck and not (len(stuck) == judged and evidence.before is None and "SOAP" in evidence.model.optimizer):
        text = f"{and_more(stuck, judged)} has a gradient and did not move in the update"
        found.append(
            evidence.found(
                text,
                stuck,
                next="check that the optimizer holds this parameter and that the step was not skipped",
                measured="unchanged",
                expected="changed",
                severity="error",
            )
        )
    idle = gradients.idle
    if idle and scalar(evidence.scalars, "loss scale") is None:
        text = f"the optimizer of {and_more(list(idle))} did not step, as it did at each audited step before"
        hint = "call step() on every optimizer"
        finding = evidence.found(text, idle, next=hint, measured="no step", expected="a step")
        found.append(finding)
    never = gradients.never
    if never:
        text = f"the optimizer of {and_more(list(never))} has not stepped once, though these have gradients and others step"
        hint = "call step() on every optimizer"
        finding = evidence.found(text, never, next=hint, measured="no step", expected="a step")
        found.append(finding)
    if remember(evidence)[1] == _STALLED:
        name = next((p.name for p in evidence.model.parameters if p.trainable), "")
        text = (
            f"{_STALLED} audited steps in a row ran backward and made no update, unlike every step before: {name} does not move"
        )
        hint = "look at the loss scaler: update() lowers a scale that overflows; and at what decides that a step is skipped"
        found.append(evidence.found(text, name, next=hint, measured="no update", expected="an update", severity="error"))
    copied = _not_copied(evidence, evidence.mastered)
    if copied:
        which = and_more(copied, len(evidence.mastered))
        text = f"{which} is as it was at step {evidence.step - 1}, though its master weight was stepped"
        hint = "copy every master weight back after the update"
        found.append(evidence.found(text, copied, next=hint, measured="unchanged", expected="changed", severity="error"))
    found += _no_longer_driven(evidence)
    if drawn:
        text = f"{and_more(drawn)} has no gradient and moved in the update"
        found.append(evidence.found(text, drawn, measured="changed", expected="unchanged", severity="error"))
    return found


def _against_their_gradients(evidence: Evidence) -> tuple[list[str], list[str], int]:
    """Return what has a gradient and did not move, what has none and moved, and how many with a gradient were judged."""
    used, gradients, seen = evidence.of(UsedGroups), evidence.of(UsedGradients), evidence.tensors
    groups = {name: group for group in used.groups for name in group.names}
    rates = {name: _rate(groups.get(name), evidence) for name in seen.names}
    apart = evidence.mastered | evidence.of(UpdateCounts).by_hand
    stuck: list[str] = []
    drawn: list[str] = []
    judged = 0
    for name in seen.with_slot("value_after") if evidence.of(UpdateCounts).updates else ():
        before, after = seen.checksum(name, "value"), seen.checksum(name, "value_after")
        if before is None or after is None or name in apart:
            continue
        if (name, "grad") not in seen:
            has_gradient = name in gradients.reached or any(slot.startswith("grad") for slot in seen.slots(name))
            if before != after and not has_gradient and used.groups:
                drawn.append(name)
            continue
        judged += 1
        elsewhere = name in evidence.history.handed_over and name not in groups
        if before == after and _should_move(evidence, name, rates[name]) and not elsewhere and not _may_rest(groups.get(name)):
            stuck.append(name)
    return stuck, drawn, judged


def remember(evidence: Evidence) -> tuple[int, int]:
    """Return how many audited steps have updated, and how many in a row since then ran backward and did not.

    The first is far below 0 where not every step updates, as gradients are accumulated over several.
    """
    moving, stalled = evidence.remembered("movement", (0, 0))
    if evidence.of(UpdateCounts).updates:
        return moving + 1, 0
    if not evidence.of(Backwards).count:
        return moving, stalled
    return (moving, stalled + 1) if moving >= STEADY else (-1 << 30, stalled)


def _no_longer_driven(evidence: Evidence) -> list[Finding]:
    """Find parameters that nothing trains, that had moved at each audited step before, and that stand still."""
    before, seen = evidence.before, evidence.tensors
    known = [name for name, times in evidence.history.driven.items() if times >= STEADY and (name, "value") in seen]
    if before is None or not evidence.of(UpdateCounts).updates or not before.of(UpdateCounts).updates:
        return []
    still = [name for name in known if before.tensors.checksum(name, "value_after") == seen.checksum(name, "value")]
    if not still or 2 * len(still) <= len(known):
        return []
    moved = and_more(still, len(known))
    text = f"{moved} was moved by something other than the optimizer at each earlier audited step, and no longer moves"
    hint = "a moving average of the weights must follow the model that is trained"
    return [evidence.found(text, still, next=hint, measured="unchanged", expected="changed")]


def _not_copied(evidence: Evidence, mastered: frozenset[str]) -> list[str]:
    """Return the parameters that have not moved since the update before, of those that are copied from master weights."""
    before, seen = evidence.before, evidence.tensors
    if before is None or not evidence.follows or not (before.of(UpdateCounts).updates and mastered):
        return []
    held = [name for name in seen.with_slot("value") if name in mastered and (name, "value") in before.tensors]
    still = [name for name in held if seen.checksum(name, "value") == before.tensors.checksum(name, "value")]
    if 2 * len(still) > len(held):
        return []  # a step that was skipped
    return [name for name in still if _should_move(before, name, _rate(None, before))]


def _rate(group: ParameterGroup | None, evidence: Evidence) -> float:
    used = evidence.of(UsedGroups)
    rate = group.options.get("lr") if group is not None else None
    if group is not None and isinstance(rate, float | int):
        estimated = group.options.get("d")  # of D-Adaptation and Prodigy; it begins at 1e-6
        return float(rate) * (estimated if isinstance(estimated, float) else 1.0)
    return used.rates[0] if used.rates else 0.0


def _may_rest(group: ParameterGroup | None) -> bool:
    """Tell whether an optimizer leaves weights where they are: at its tolerance (L-BFGS), where a gradient turned (Rprop)."""
    return group is not None and ("tolerance_grad" in group.options or "etas" in group.options)


def _should_move(evidence: Evidence, name: str, rate: float) -> bool:
    seen = evidence.tensors
    gradient, largest = seen.number(name, "grad", "absmax"), seen.number(name, "value", "absmax")
    resolution = _EPSILON.get(seen.dtypes[name, "value"], 1.0)
    return gradient > 0 and rate * min(gradient, 1.0) > resolution * largest
