"""A classifier gets better than the shares of the classes alone.

Judged where the one loss of a step is `cross_entropy` or `nll_loss` over 2 to 100 classes, with one target a row. H is the
entropy of the targets, 128 or more, of the last six audited steps after the twentieth step. The mean of -log p(target) over
these steps is below 0.995 H, or that of one step is below 0.9 H. This is judged once a weight has changed its norm by a tenth:
then it has been trained. Reported as a warning: a hard task may need longer, so the finding says for how long.

A model that knows only how frequent each class is has this loss. Usual causes are inputs and targets that were shuffled
separately, an output that is read at the wrong place, and features that do not reach the head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "backward"
_LOOKS, _EARLY, _MOST_CLASSES, _MOVED = 6, 20, 100, 0.1
_MEAN, _EACH, _FEWEST = 0.995, 0.9, 128


class Look(NamedTuple):
    """ordinal: of the step. surprise: the mean of -log p(target). counts: how often each class was a target."""

    ordinal: int
    surprise: float
    counts: tuple[float, ...]


class SeenAnswers(NamedTuple):
    """norms: of each parameter at the first audited step. looks: the last ones."""

    norms: dict[str, float]
    looks: tuple[Look, ...]


def remember(evidence: Evidence) -> SeenAnswers:
    """Return what the losses were at the last audited steps."""
    norms = {name: evidence.tensors.number(name, "value", "norm") for name in evidence.tensors.with_slot("value")}
    known: SeenAnswers = evidence.remembered("trivial_answer", SeenAnswers(norms, ()))
    calls = evidence.of(LossCalls).losses
    call = calls[0] if len(calls) == 1 and _is_judged(calls[0]) else None
    if call is None or evidence.ordinal <= _EARLY:
        return known
    counts = call.classes[: len(call.classes) // 2]
    look = Look(evidence.ordinal, call.classes[-1] / max(1.0, sum(counts)), counts)
    return SeenAnswers(known.norms, (*known.looks, look)[-_LOOKS:])


def check(evidence: Evidence) -> list[Finding]:
    """Find a loss that stays at the entropy of the targets."""
    seen = remember(evidence)
    if len(seen.looks) < _LOOKS or len({len(look.counts) for look in seen.looks}) > 1:
        return []
    counts = np.sum([look.counts for look in seen.looks], axis=0)
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * np.log(shares)).sum())
    surprise = [look.surprise for look in seen.looks]
    if (
        entropy == 0
        or counts.sum() < _FEWEST
        or not np.mean(surprise) >= _MEAN * entropy
        or not min(surprise) >= _EACH * entropy
        or not _moved(evidence, seen)
    ):
        return []
    text = (
        f"the loss stays at the entropy of its targets: {np.mean(surprise):.4g} on average at {_LOOKS} audited steps from step "
        f"{seen.looks[0].ordinal} on. An answer that does not look at the input, the shares of the classes, has {entropy:.4g}"
    )
    hint = "see whether inputs and targets belong together, and whether the output is read where the input is"
    return [
        evidence.found(text, "loss", next=hint, measured=float(np.mean(surprise)), expected=entropy, floor=_MEAN, kind="scalar")
    ]


def _is_judged(call: LossCall) -> bool:
    one_a_row = len(call.shapes[1]) == 1 and call.rows in (0, call.count)
    return one_a_row and len(call.classes) > 2 and len(call.classes) <= 2 * _MOST_CLASSES + 1 and call.smoothing == 0


def _moved(evidence: Evidence, seen: SeenAnswers) -> bool:
    """Tell whether the norm of a parameter has changed enough since the first audited step."""
    now = evidence.tensors
    return any(abs(now.number(name, "value", "norm") - was) > _MOVED * was for name, was in seen.norms.items() if was > 0)
