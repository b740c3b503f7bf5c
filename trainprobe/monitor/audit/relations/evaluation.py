"""An evaluation repeats: with the same input it gives the same output.

Relation: in a forward of a model that is in evaluation mode no module is in training mode, and no random number is drawn.
Nothing is run again: the random state before and after each module tells. Tolerance none.
Usually caused by a part of the model that `eval()` did not reach (transformers issue 33844), or by `dropout(x)` without
`training=self.training`.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more

COST = frozenset({"host"})
EVERY = 10
STAGE = "evaluation"


def check(evidence: Evidence) -> list[Finding]:
    """Find evaluations in which something of the training was alive."""
    for seen in evidence.facts.evaluations:
        if seen.random:
            state = "it is in training mode" if seen.random[0] in seen.live else "although it is in evaluation mode"
            text = (
                f"{and_more(list(seen.random))} drew random numbers in an evaluation, {state}: the same input gives two outputs"
            )
            return [_finding(evidence, text, seen.random[0], "random numbers drawn", "none drawn")]
        if seen.live:
            text = f"{len(seen.live)} modules are in training mode in an evaluation: {and_more(list(seen.live))}"
            return [_finding(evidence, text, seen.live[0], "training mode", "evaluation mode")]
    return []


def _finding(evidence: Evidence, text: str, name: str, measured: str, expected: str) -> Finding:
    return evidence.finding(
        "evaluation",
        text,
        name,
        "output",
        measured=measured,
        expected=expected,
        kind="module",
        next="call model.eval() on the whole model, and pass training=self.training to functional dropout",
    )
