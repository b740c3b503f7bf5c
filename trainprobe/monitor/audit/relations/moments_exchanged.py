"""What an optimizer begins with for a parameter fits that parameter's gradients, and not those of another one.

Relation, at the first audited step, of two parameters of one shape whose `exp_avg_sq` is there before the first update. The
logarithms of second moments and of squared gradients correlate over a sample of elements. The moments do not fit each other's
gradients by 0.5 better, in sum, than their own. At least 64 elements, of which more than half have both numbers. The noise of a
correlation of 64 elements is 0.125, of four of them 0.25. Reported as a warning.
Usually caused by an optimizer that was made with its parameters in another order than the one that was saved: a state dict of
torch tells parameters by their numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"first_moments"})
STAGE = "state"
PYTORCH_ONLY = "moments and gradients are set against each other by torch"
_BETTER, _OWN = 0.5, 0.2


@dataclass(frozen=True, slots=True)
class FirstMoments:
    """Which moments fit which gradients."""

    fits: tuple[tuple[str, str, float, float, float, float], ...] = ()
    """Two parameters of one shape, and the correlations of the moments of the first with its own gradient and with that of the
    second, of the second with its own and with that of the first."""


def check(evidence: Evidence) -> list[Finding]:
    """Find the two parameters whose moments fit each other's gradients best."""
    fits = evidence.of(FirstMoments).fits
    gains = [(cross + back - own - its, min(cross, back), a, b) for a, b, own, cross, its, back in fits]
    gain, least, a, b = max(gains, default=(0.0, 0.0, "", ""))
    if gain < _BETTER or least < _OWN:
        return []
    text = f"the state of {a} and {b} is exchanged: the exp_avg_sq of each goes with the gradient of the other"
    hint = "make the optimizer with its parameters in the order in which they were when its state was saved"
    return [evidence.found(text, a, "exp_avg_sq", next=hint, measured=gain, expected=0.0, floor=_BETTER, names=[a, b])]
