"""Every expert of a layer gets tokens.

Relation: the experts of one layer are modules in a list (`experts.3.up.weight`, or a list beside a module called router or
gate) or the rows of one parameter [experts, …]. No expert is without a gradient at six audited steps with an update in a row,
while each expert with a gradient at any of these steps had one at nine in ten of them. A gradient of zeros counts as none.
Tolerance none. Reported as a warning. Frozen experts are left out.
Usually caused by a router that has collapsed (weights that were not initialised, a balancing loss that is missing or has the
wrong sign), by a bias or mask that hides an expert, or by experts that were replaced after the router was made. The loss hardly
shows it. If few tokens are distributed over many experts, no expert gets tokens at every step, and nothing is judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import numbered
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"expert_gradients", "updates"})
STAGE = "backward"
_LOOKS, _OFTEN = 6, 0.9
_IN_A_LIST = re.compile(r"(?:^|\.)(\d+)\.")
_ROUTERS = frozenset({"router", "gate", "gating", "wg", "switch"})
Experts = Mapping[str, Mapping[int, tuple[bool, ...]]]  # layer → expert → whether it got a gradient, at the last looks


@dataclass(frozen=True, slots=True)
class ReachedExperts:
    """Which experts got a gradient, where one parameter holds those of all."""

    reached: Mapping[str, tuple[bool, ...]] = field(default_factory=dict[str, tuple[bool, ...]])
    """Parameter → whether each of its experts did."""


def check(evidence: Evidence) -> list[Finding]:
    """Find experts that nothing is routed to."""
    if not evidence.of(UpdateCounts).updates:
        return []
    found: list[Finding] = []
    for layer, experts in remember(evidence).items():
        idle = [number for number, looks in experts.items() if len(looks) == _LOOKS and not any(looks)]
        working = [looks for looks in experts.values() if any(looks)]
        if idle and working and all(sum(looks) >= _OFTEN * _LOOKS for looks in working):
            found.append(_finding(evidence, layer, idle, len(experts)))
    return found


def remember(evidence: Evidence) -> Experts:
    """Return which experts got a gradient at the last audited steps with an update."""
    known: Experts = evidence.remembered("idle_experts", {})
    if not evidence.of(UpdateCounts).updates:
        return known
    now = _experts(evidence)
    return {
        layer: {number: (*known.get(layer, {}).get(number, ()), some)[-_LOOKS:] for number, some in experts.items()}
        for layer, experts in now.items()
        if any(experts.values()) and len(experts) > 1
    } | {layer: looks for layer, looks in known.items() if layer not in now}


def _experts(evidence: Evidence) -> dict[str, dict[int, bool]]:
    """Return layer → expert → whether any parameter of it has a gradient that is not zero in this step."""
    found: dict[str, dict[int, bool]] = {}
    trained = [p.name for p in evidence.model.parameters if p.trainable and p.owned is not False]
    parts = [name.split(".") for name in trained]
    routed = {".".join(names[:i]) for names in parts for i, part in enumerate(names) if part in _ROUTERS}
    for name in trained:
        for match in _IN_A_LIST.finditer(name):
            layer = name[: match.start()]
            parent, _, last = layer.rpartition(".")
            if layer and ("expert" in last.lower() or (parent in routed and last not in _ROUTERS)):
                experts = found.setdefault(layer, {})
                number = int(match[1])
                experts[number] = experts.get(number, False) or evidence.tensors.number(name, "grad", "absmax") > 0
                break
    rows: Mapping[str, tuple[bool, ...]] = evidence.of(ReachedExperts).reached
    for name, some in rows.items():
        layer = name.rpartition(".")[0]
        was = found.get(layer, {})
        found[layer] = {number: was.get(number, False) or one for number, one in enumerate(some)}
    return found


def _finding(evidence: Evidence, layer: str, idle: list[int], of: int) -> Finding:
    many = len(idle) > 1
    text = (
        f"{numbered('expert', idle)} of {of} in {layer} got no gradient at {_LOOKS} audited steps in a row: "
        f"nothing is routed to {'them' if many else 'it'}"
    )
    hint = "look at the router: its weights, what is added to its logits, and the loss that balances the experts"
    name = next((p.name for p in evidence.model.parameters if p.name.startswith(f"{layer}.{idle[0]}.")), None)
    name = name or next(p.name for p in evidence.model.parameters if p.name.startswith(f"{layer}."))
    names = [p.name for p in evidence.model.parameters if any(p.name.startswith(f"{layer}.{i}.") for i in idle)] or [name]
    return evidence.found(text, name, "grad", next=hint, measured="no gradient", expected="a gradient", names=names)
