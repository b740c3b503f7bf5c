"""The rows of a weight matrix do not stay equal to each other.

Relation: a trainable parameter of two dimensions or more that was moved by updates does not have rows that are all equal, with
a gradient whose rows are all equal too (32 of them are compared, and only where that is at least four numbers). Floor: 1e-3 of
the largest weight and 1e-2 of the largest gradient, as equal sums may round differently. One that is still zero is not judged.
Reported as a warning.
Usually caused by weights that were filled with a constant: all units of the layer then compute the same, get the same gradient,
and stay the same for ever, so that the layer is as wide as one unit. Layers that begin at zero on purpose (the second matrix of
an adapter, a zero convolution) get different gradients in their rows and cannot violate this after their first update.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"rerun", "fingerprints"})
OBSERVERS = frozenset({"equal_rows", "updates"})
STAGE = "update"


@dataclass(frozen=True, slots=True)
class EqualMatrices:
    """Weight matrices without a difference between their rows."""

    names: tuple[str, ...] = ()
    """Parameters whose rows, and those of whose gradients, are all equal."""


def check(evidence: Evidence) -> list[Finding]:
    """Find matrices whose rows are equal."""
    names = [name for name in evidence.of(EqualMatrices).names if _was_trained(evidence, name)]
    if not names:
        return []
    text = (
        f"all compared rows of {and_more(names, len(evidence.model.parameters))} and of its gradient are equal, though updates "
        "have moved it. Its units never become different"
    )
    hint = "initialise the weights of this layer at random (kaiming_uniform_, normal_), and not with a constant"
    return [evidence.found(text, names, next=hint, measured="equal rows", expected="rows that differ")]


def _was_trained(evidence: Evidence, name: str) -> bool:
    before, seen = evidence.before, evidence.tensors
    if before is None or not before.of(UpdateCounts).updates or not before.tensors.number(name, "grad", "absmax") > 0:
        return False
    was, now = before.tensors.checksum(name, "value"), seen.checksum(name, "value")
    moved = was is not None and now is not None and was != now
    return moved and seen.number(name, "grad", "absmax") > 0 and seen.number(name, "value", "absmax") > 0
