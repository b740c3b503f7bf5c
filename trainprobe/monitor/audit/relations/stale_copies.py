"""The average of a model that is evaluated follows its running statistics too.

Relation: where a copy of the model (a module of its class, with parameters and buffers of the same names) is called in
evaluation mode, and its weights were written since it was called before while running statistics of the model moved, those of
the copy were written too. Tolerance none. Reported as a warning.
Usually caused by a moving average of the weights that goes over `parameters()` and not over `buffers()`: the copy is
normalised with the statistics of the day it was made, and its evaluations are wrong. A copy that takes over the whole
`state_dict` cannot violate this; nor can one that rests, a copy in training mode, or a model without running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"copies"})
STAGE = "evaluation"


@dataclass(frozen=True, slots=True)
class StaleCopies:
    """Copies of the model that follow its weights, and not its buffers."""

    names: tuple[str, ...] = ()
    """Running statistics that stood still while weights of the copy and statistics of the model moved."""


def check(evidence: Evidence) -> list[Finding]:
    """Find copies whose statistics stand still."""
    stale = list(evidence.of(StaleCopies).names)
    if not stale:
        return []
    text = (
        f"a copy of the model that is evaluated follows its weights, but not its running statistics, {and_more(stale)}. "
        "It normalises with old numbers"
    )
    hint = "copy the buffers with the parameters (timm's ModelEma, AveragedModel), or recompute them before evaluating"
    measured, expected = "unchanged", "as in the model"
    return [evidence.found(text, stale, "buffer", next=hint, measured=measured, expected=expected, kind="buffer")]
