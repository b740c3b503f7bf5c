"""The rows of a step are drawn from all of the data.

Relation, for classifications with one target [N] a row, N at least 8: not all targets of a step are of one class, at four or
more audited steps in a row that have at least two different classes together. Tolerance none: where classes are drawn at
random, this has a probability far below that of a wrong bit. Reported as a warning, since a loop may go through its classes on
purpose.
Usually caused by `shuffle=False` for files that lie sorted by class: the model learns and forgets one class after the other,
and the statistics of its normalisation follow. A loader that shuffles cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "data"
_ROWS = 8
_LOOKS = 4
_KINDS = ("cross_entropy", "nll_loss")


def check(evidence: Evidence) -> list[Finding]:
    """Find steps that each train on one class alone."""
    seen = remember(evidence)
    if len(seen) < _LOOKS or len(set(seen)) < 2 or not evidence.of(LossCalls).losses:
        return []
    listed = ", ".join(f"{number:.0f}" for number in seen[-8:])
    text = (
        f"all targets of the step are class {seen[-1]:.0f}, and at each of the last {len(seen)} audited steps they were of one "
        f"class ({listed}). The data are sorted by class and not shuffled"
    )
    hint = "shuffle the training data: DataLoader(shuffle=True), or a sampler that shuffles"
    return [evidence.found(text, "targets", "input", next=hint, measured=1.0, expected=float(len(set(seen))), kind="scalar")]


def remember(evidence: Evidence) -> tuple[float, ...]:
    """Return the one class of each audited step until this one, () where this one has several; unchanged without targets."""
    known: tuple[float, ...] = evidence.remembered("shuffled_data", ())
    calls = [call for call in evidence.of(LossCalls).losses if call.kind in _KINDS]
    if not calls:
        return known
    low = min(call.number("class_low") for call in calls)
    one = all(len(call.shapes[1]) == 1 and call.number("class_low") == call.number("class_high") == low for call in calls)
    return (*known, low)[-32:] if one and sum(call.count for call in calls) >= _ROWS else ()
