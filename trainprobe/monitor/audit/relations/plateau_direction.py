"""A plateau scheduler lowers the rate when its metric gets worse or stays, and not when it gets better.

Relation: where `ReduceLROnPlateau` has lowered the rate twice or more since its first call, its metric was at some time better
than at that call, in the direction that `mode` names, or it went no more than 3 % of that value in the other direction,
as a noisy metric does. Reported as a warning.
Usually caused by an accuracy or another score that is handed to a scheduler whose mode is "min", which is the default: the
better the model, the smaller its rate. A validation loss that rises from the first evaluation on violates it too, and is worth
a look; a metric that improves once cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"plateaus"})
STAGE = "rate"
_REDUCTIONS = 2
_FAR = 0.03  # of the first value: a metric that only shakes has no direction


@dataclass(frozen=True, slots=True)
class Plateau:
    """A scheduler that lowers the rate when a metric gets no better, as it was seen from its first call on."""

    mode: str
    """"min" or "max", what it takes for better."""
    calls: int
    """How often it was stepped."""
    reductions: int
    """How often it lowered the rate."""
    first: float
    """The metric at first."""
    low: float
    """Its lower bound until now."""
    high: float
    """Its upper bound until now."""


@dataclass(frozen=True, slots=True)
class PlateauSchedulers:
    """Schedulers of this kind."""

    plateaus: tuple[Plateau, ...] = ()
    """Those that were seen from their first call on."""


def check(evidence: Evidence) -> list[Finding]:
    """Find the first scheduler whose metric only ever went the other way."""
    wrong = next((plateau for plateau in evidence.of(PlateauSchedulers).plateaus if _is_wrong(plateau)), None)
    if wrong is None:
        return []
    better, worst = ("lower", wrong.high) if wrong.mode == "min" else ("higher", wrong.low)
    text = (
        f"ReduceLROnPlateau has lowered the learning rate {wrong.reductions} times. With mode {wrong.mode!r} it waits for a "
        f"{better} metric, which began at {wrong.first:.4g}, went to {worst:.4g}, and was never {better} in {wrong.calls} calls"
    )
    other = "max" if wrong.mode == "min" else "min"
    hint = (
        f"make the scheduler with mode={other!r} if this metric is better when it is {'higher' if other == 'max' else 'lower'}"
    )
    return [evidence.found(text, "lr", next=hint, measured=worst, expected=f"{better} than {wrong.first:.4g}", kind="scalar")]


def _is_wrong(plateau: Plateau) -> bool:
    improved = plateau.low < plateau.first if plateau.mode == "min" else plateau.high > plateau.first
    other = plateau.high - plateau.first if plateau.mode == "min" else plateau.first - plateau.low
    return plateau.reductions >= _REDUCTIONS and other > _FAR * abs(plateau.first) and not improved
