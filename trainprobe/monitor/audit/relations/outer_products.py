"""A prediction meets its own target, and no other.

Relation, for + - * / of tensors outside of the modules of the model, in a step in which a linear layer with a single output
ran: numbers [N] and [N, 1] are not broadcast to [N, N], unless the program made the column on purpose, as a view (`x[:,
None]`, `x.view(-1, 1)`). At this audited step and the one before, on the same line. Tolerance none. Reported as a warning.
Usually caused by the output [N, 1] of a network that is not squeezed before it is subtracted from targets, returns or rewards
[N]: the mean is then over all pairs, and what is learned is the mean of the targets. Operands of one shape cannot violate
this.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"outer_products"})
STAGE = "forward"


@dataclass(frozen=True, slots=True)
class OuterOperation:
    """One arithmetic operation outside of the model's modules that made [count, count] of [count] and [count, 1]."""

    operation: str
    """Its sign."""
    count: int
    """Elements of either operand."""
    place: str
    """File and line of the code that did it."""


@dataclass(frozen=True, slots=True)
class OuterOperations:
    """Such operations of a step in which a layer with a single output ran."""

    outer: tuple[OuterOperation, ...] = ()
    """In their order."""


def check(evidence: Evidence) -> list[Finding]:
    """Find the first line that broadcasts two vectors against each other."""
    before = evidence.before.of(OuterOperations).outer if evidence.before is not None else ()
    lines = {(o.operation, o.place) for o in before}
    seen: OuterOperation | None = next((o for o in evidence.of(OuterOperations).outer if (o.operation, o.place) in lines), None)
    if seen is None:
        return []
    n = seen.count
    text = (
        f"[{n}] {seen.operation} [{n}, 1] is broadcast to [{n}, {n}] at {seen.place}: each number meets every other one, and "
        "not its own alone"
    )
    hint = "give both one shape: squeeze(-1) the output of the network before it is compared"
    return [evidence.found(text, "loss", next=hint, measured=float(n * n), expected=float(n), kind="scalar")]
