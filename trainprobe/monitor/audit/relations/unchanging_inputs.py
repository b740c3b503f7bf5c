"""What is drawn for each row of a batch is drawn anew for each batch.

Relation: a vector with one number for each row, [N] or [N, 1], in no order, with which the model is called, has not the same
bits at four or more audited steps in a row in which another argument with as many rows was a new one each time. Reported as a
warning: it may be a constant of the rows.
Usually caused by noise steps, weights or lengths that are drawn before the loop. Masks, positions and whatever is no vector are
left alone, and so is a training on one batch.
"""

from __future__ import annotations

from math import prod
from typing import Any

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenNumbers

COST = frozenset({"host"})
OBSERVERS = frozenset({"given_numbers"})
STAGE = "data"
_LOOKS = 4
Seen = dict[str, tuple[int, int, int]]  # argument → fingerprint, looks at which it was the same, looks at which it was new


def remember(evidence: Evidence) -> Seen:
    """Return how often in a row each argument was the same, and how often a new one."""
    known: Seen = evidence.remembered("unchanging_inputs", {})
    now: Seen = {}
    for argument in evidence.of(GivenNumbers).arguments:
        was, same, new = known.get(argument.name, (None, 0, 0))
        equal = was == argument.fingerprint
        now[argument.name] = argument.fingerprint, same + 1 if equal else 1, 0 if equal else new + 1
    return now or known


def check(evidence: Evidence) -> list[Finding]:
    """Find the first argument that stays as it was."""
    seen: Any = remember(evidence)
    arguments = evidence.of(GivenNumbers).arguments
    for argument in arguments:
        looks, vector = seen[argument.name][1], argument.shape[1:] in ((), (1,)) and bool(argument.shape)
        others = [o for o in arguments if o is not argument and o.shape[:1] == argument.shape[:1]]
        new = next((o for o in others if seen[o.name][2] >= _LOOKS), None)
        if vector and argument.unordered and looks >= _LOOKS and new is not None:
            text = (
                f"the input {argument.name} had the same {prod(argument.shape)} numbers, to the bit, at {looks} audited steps "
                f"in a row, while {new.name} was a new one each time"
            )
            hint = "draw it anew in each step"
            measured = "the same at each step"
            return [evidence.found(text, argument.name, next=hint, measured=measured, expected="other numbers", kind="scalar")]
    return []
