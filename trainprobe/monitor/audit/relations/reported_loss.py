"""The reported loss is the loss that is differentiated.

Relation: let ℓᵢ be the values from which the n backward passes of a step begin, divided by the loss scale. The reported loss R
is their sum, the mean or sum of that over the dp and cp ranks, or one of them if they belong to several models. Reported are

    Σℓᵢ = n R          for one pass a micro-batch: the gradient is that of a sum, the report that of the mean
    R = n ℓₙ, or ℓₙ    in such a step, and neither Σℓᵢ nor its mean: the report is that of the last micro-batch alone
    R = Σ ℓᵢ sᵢ        with sᵢ the loss scale for some i and 1 for the others: these were not scaled
    R = Σ ℓᵢ 2^kᵢ      with unequal kᵢ of -1, 0 and 1, under a loss scale: it changed within the step
    R was one of these at three audited steps in a row before, and is none of them now

Floor: 1e-4 of Σ|ℓᵢ| for equality, 1e-2 for what is no longer equal (losses of 16 bits round; 1e-4 if it was equal within 3e-6
at each of three steps), 3e-6 for a scale that changed. The first is not judged if there are as many data-parallel ranks as
micro-batches, because either may be the factor. Each pass may use several forwards, as many as the others. Not judged are a
report that was never the loss itself (a moving average), an optimizer that tries several points within its step, and a step
whose gradients were cleared unused. Passes with an update between them belong to several models, not to micro-batches.
Usually caused by gradient accumulation without a division (the gradient is n times too large, which Adam hides and clipping or
SGD does not), by a report of one micro-batch, by a loss that is divided by the tokens of one rank, and by a term of the loss
that bypasses the scaler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"gradient_use", "model_calls", "updates"})
STAGE = "backward"
PYTORCH_ONLY = "it is not known where a backward pass begins"
STEADY = 3
_FLOOR, _WIDE_FLOOR = 1e-4, 1e-2
_EXACT = 3e-6  # what sums of a few float32 numbers round by
_SEVERAL = 4  # of more backward passes some sum would fit by chance


def check(evidence: Evidence) -> list[Finding]:
    """Find a reported loss that is not the one that was differentiated."""
    gradients = evidence.of(UsedGradients)
    losses, reported = _losses(evidence), scalar(evidence.scalars, "loss")
    unknown = not losses or not evidence.of(UpdateCounts).updates or gradients.closure or gradients.discarded
    if unknown or reported is None or not math.isfinite(reported):
        return []
    n, size = len(losses), sum(map(abs, losses))
    totals = _totals(evidence)
    per_micro = n > 1 and bool(evidence.batches) and len(evidence.batches) % n == 0 and not gradients.in_turns
    if per_micro and evidence.place.world_size % n and any(_near(total, n * reported, size) and total for total in totals):
        return [_summed(evidence, n, totals[0], reported)]
    if any(_near(total, reported, size) for total in totals):
        return []
    mean = any(_near(total, n * reported, size) for total in totals)  # what the last one alone may happen to be, too
    if per_micro and not mean and any(_near(part, reported, size) for part in (n * losses[-1], losses[-1])):
        return [_last_alone(evidence, n, totals[0], reported)]
    unscaled = _not_scaled(evidence, losses, reported)
    if unscaled:
        return [_missed_the_scaler(evidence, unscaled, totals[0], reported)]
    if _scales_differ(evidence, losses, reported):
        return [_scale_changed(evidence, totals[0], reported)]
    known = _known(evidence)
    tolerance = _FLOOR if known.exactly >= STEADY else _WIDE_FLOOR
    if known.explained < STEADY or min(abs(reported - k) for k in (*totals, *losses)) <= tolerance * size:
        return []
    return [_no_longer(evidence, totals, reported)]


class _InARow(NamedTuple):
    """At how many audited steps in a row the report was explained, and that to the last bits of a float32."""

    explained: int = 0
    exactly: int = 0


def remember(evidence: Evidence) -> _InARow:
    """Return at how many audited steps in a row the report has been explained."""
    known = _known(evidence)
    return _InARow(known.explained + 1 if _explained(evidence) else 0, known.exactly + 1 if _exactly_explained(evidence) else 0)


def _known(evidence: Evidence) -> _InARow:
    return evidence.remembered("reported_loss", _InARow())


def _exactly_explained(evidence: Evidence) -> bool:
    """Tell whether that is so to the last bits of a float32, and these losses have as many."""
    return any(_is_fine(loss) for loss in _losses(evidence)) and _explained(evidence, _EXACT)


def _is_fine(number: float) -> bool:
    """Tell whether a number has more bits than a format of 16 bits holds."""
    return not (math.frexp(number)[0] * 2**11).is_integer()


def _explained(evidence: Evidence, floor: float = 1e-4) -> bool:
    """Tell whether the reported loss of a step is what its backward passes began from, within `floor` of their size."""
    losses, reported = _losses(evidence), scalar(evidence.scalars, "loss")
    if not losses or reported is None:
        return False
    size = sum(map(abs, losses))
    return any(_near(number, reported, size, floor) for number in (*_totals(evidence), *losses))


def differentiated(evidence: Evidence) -> float:
    """Return the sum of what backward passes of this rank began from, without the loss scale; NaN where that is not known."""
    return sum(losses) if (losses := _losses(evidence)) else float("nan")


def _losses(evidence: Evidence) -> list[float]:
    scale = scalar(evidence.scalars, "loss scale") or 1.0
    losses = [value / scale for value in evidence.of(UsedGradients).differentiated]
    return losses if all(map(math.isfinite, losses)) else []


def _totals(evidence: Evidence) -> list[float]:
    """Return the sum of this rank's losses, and its mean and its sum over the ranks that differ in data or tokens."""
    losses = [peer.numbers["differentiated"] for peer in along(evidence, frozenset({"dp", "cp"}))]
    return [differentiated(evidence), *([sum(losses) / len(losses), sum(losses)] if losses else [])]


def _near(a: float, b: float, size: float, floor: float = _FLOOR) -> bool:
    return abs(a - b) <= floor * max(size, abs(a))


def _summed(evidence: Evidence, n: int, total: float, reported: float) -> Finding:
    text = (
        f"the {n} losses that were differentiated add up to {total:.6g}, {n} times the reported loss {reported:.6g}. The "
        "gradient is summed over the micro-batches and not averaged"
    )
    return _finding(evidence, text, total, reported, "divide the loss of each micro-batch by their number before backward")


def _not_scaled(evidence: Evidence, losses: Sequence[float], reported: float) -> list[int]:
    """Return which backward passes began from a loss that was not scaled, where that explains the reported loss."""
    scale = scalar(evidence.scalars, "loss scale") or 1.0
    if scale == 1.0 or not 1 < len(losses) <= _SEVERAL:
        return []
    for chosen in product((False, True), repeat=len(losses)):
        parts = [value * (scale if bare else 1.0) for value, bare in zip(losses, chosen, strict=True)]
        if any(chosen) and not all(chosen) and _near(sum(parts), reported, sum(map(abs, parts))):
            return [i for i, bare in enumerate(chosen) if bare]
    return []


def _scales_differ(evidence: Evidence, losses: Sequence[float], reported: float) -> bool:
    """Tell whether a loss scale that was doubled or halved between backward passes explains the reported loss."""
    if (scalar(evidence.scalars, "loss scale") or 1.0) == 1.0 or not 1 < len(losses) <= _SEVERAL:
        return False
    choices = (c for c in product((0.5, 1.0, 2.0), repeat=len(losses)) if len(set(c)) > 1)
    weighed = ([value * factor for value, factor in zip(losses, chosen, strict=True)] for chosen in choices)
    return any(_near(sum(parts), reported, sum(map(abs, parts)), _EXACT) for parts in weighed)


def _scale_changed(evidence: Evidence, total: float, reported: float) -> Finding:
    passes = len(evidence.of(UsedGradients).differentiated)
    text = (
        f"the loss scale changed between the {passes} backward passes of the step. Unscaling "
        "divides all of their gradients by one scale, so they have different weights"
    )
    return _finding(evidence, text, total, reported, "call scaler.update() once per step, after scaler.step()")


def _missed_the_scaler(evidence: Evidence, unscaled: Sequence[int], total: float, reported: float) -> Finding:
    scale = scalar(evidence.scalars, "loss scale") or 1.0
    which, passes = ", ".join(map(str, unscaled)), len(evidence.of(UsedGradients).differentiated)
    text = (
        f"backward pass {which} of {passes} began from a loss that was not multiplied by the loss "
        f"scale {scale:g}. Unscaling divides its gradient nevertheless, so it has almost no weight"
    )
    return _finding(evidence, text, total, reported, "call scaler.scale(loss) on every loss before backward")


def _last_alone(evidence: Evidence, n: int, total: float, reported: float) -> Finding:
    text = (
        f"the reported loss {reported:.6g} is that of the last of {n} micro-batches alone; those that were differentiated add "
        f"up to {total:.6g}"
    )
    return _finding(evidence, text, reported, total, "report the mean over all micro-batches of the step")


def _no_longer(evidence: Evidence, totals: Sequence[float], reported: float) -> Finding:
    listed = " and ".join(f"{value:.6g}" for value in evidence.of(UsedGradients).differentiated[:4])
    text = (
        f"the reported loss {reported:.6g} is no longer what is differentiated, as it was at each audited step before. The "
        f"backward passes began from {listed}, {totals[0]:.6g} without the loss scale"
    )
    hint = "report the very number that backward is called on; look at what it is divided by, and whether all of it is scaled"
    return _finding(evidence, text, reported, totals[0], hint)


def _finding(evidence: Evidence, text: str, measured: float, expected: float, hint: str) -> Finding:
    return evidence.found(text, "loss", next=hint, measured=measured, expected=expected, floor=_FLOOR, kind="scalar")
