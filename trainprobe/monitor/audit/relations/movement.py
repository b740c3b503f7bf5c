"""A parameter with a gradient moves in an update, and one without does not.

Relation: after an update with a learning rate above zero the fingerprint of every stepped parameter whose gradient is not
zero is another one, unless the largest possible change lies below the resolution of its dtype: lr · min(max|g|, 1) <= ε ·
max|w|. A parameter without a gradient keeps its fingerprint. Tolerance zero.
Usually caused by an optimizer that holds other tensors, by a step that was skipped on some ranks, or by something that writes
to weights beside the optimizer.
"""

from __future__ import annotations

from trainprobe.engine.facts import Group
from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more

COST = frozenset({"fingerprints"})
EVERY = 10
STAGE = "update"
_EPSILON = {"torch.float64": 2.0**-52, "torch.float32": 2.0**-23, "torch.float16": 2.0**-10, "torch.bfloat16": 2.0**-7}


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that should have moved and did not, and the other way round."""
    seen = evidence.tensors
    groups = {name: group for group in evidence.facts.groups for name in group.names}
    rates = {name: _rate(groups.get(name), evidence) for name in seen.names}
    stuck: list[str] = []
    drawn: list[str] = []
    judged = 0
    for name in seen.with_slot("value_after"):
        before, after = seen.checksum(name, "value"), seen.checksum(name, "value_after")
        if before is None or after is None or not evidence.facts.updates:
            continue
        if (name, "grad") not in seen:
            if before != after and not any(slot.startswith("grad") for slot in seen.slots(name)) and evidence.facts.groups:
                drawn.append(name)
            continue
        judged += 1
        if before == after and _should_move(evidence, name, rates[name]):
            stuck.append(name)
    found: list[Finding] = []
    if stuck:
        text = f"{and_more(stuck, judged)} has a gradient and did not move in the update"
        found.append(
            evidence.finding(
                "movement",
                text,
                stuck[0],
                measured="unchanged",
                expected="changed",
                next="check that the optimizer holds this parameter and that the step was not skipped",
            )
        )
    if drawn:
        text = f"{and_more(drawn)} has no gradient and moved in the update"
        found.append(evidence.finding("movement", text, drawn[0], measured="changed", expected="unchanged"))
    return found


def _rate(group: Group | None, evidence: Evidence) -> float:
    rate = group.options.get("lr") if group is not None else None
    if isinstance(rate, float | int):
        return float(rate)
    return evidence.facts.rates[0] if evidence.facts.rates else 0.0


def _should_move(evidence: Evidence, name: str, rate: float) -> bool:
    seen = evidence.tensors
    gradient, largest = seen.number(name, "grad", "absmax"), seen.number(name, "value", "absmax")
    resolution = _EPSILON.get(seen.dtypes[name, "value"], 1.0)
    return gradient > 0 and rate * min(gradient, 1.0) > resolution * largest
