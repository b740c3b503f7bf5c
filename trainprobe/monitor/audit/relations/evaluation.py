"""An evaluation repeats: with the same input it gives the same output.

Relation: in a forward of a model that is in evaluation mode no module is in training mode, and no dropout draws random
numbers. Nothing is run again: the random state before and after each module tells, and whether a dropout was applied there. A
model that samples on purpose (a variational autoencoder) does so without one: that is a note. Tolerance none.
Usually caused by a part of the model that `eval()` did not reach (transformers issue 33844), or by `dropout(x)` without
`training=self.training`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import Evaluation, TrainingCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"model_calls"})
STAGE = "evaluation"


def check(evidence: Evidence) -> list[Finding]:
    """Find evaluations in which something of the training was alive."""
    return next((found for seen in evidence.of(TrainingCalls).evaluations if (found := _judge(evidence, seen))), [])


def _judge(evidence: Evidence, seen: Evaluation) -> list[Finding]:
    awake = [name for name in seen.random if name in seen.live or name in seen.dropped]
    if awake:
        state = "it is in training mode" if awake[0] in seen.live else "its dropout does not ask for the mode"
        text = f"{and_more(awake)} drew random numbers in an evaluation, as {state}: the same input gives two outputs"
        return [_finding(evidence, text, awake, "random numbers drawn", "none drawn")]
    if seen.live:
        text = f"{len(seen.live)} modules are in training mode in an evaluation: {and_more(list(seen.live))}"
        return [_finding(evidence, text, seen.live, "training mode", "evaluation mode")]
    if seen.random:
        drawn = and_more(list(seen.random))
        text = f"{drawn} draws random numbers in an evaluation; no dropout does, so it is assumed to be intended"
        return [_finding(evidence, text, seen.random, "random numbers drawn", "none drawn", "info")]
    return []


def _finding(
    evidence: Evidence, text: str, names: Sequence[str], measured: str, expected: str, severity: str = "error"
) -> Finding:
    hint = "call model.eval() on the whole model, and pass training=self.training to functional dropout"
    return evidence.found(
        text, names, "output", next=hint, measured=measured, expected=expected, kind="module", severity=severity
    )
