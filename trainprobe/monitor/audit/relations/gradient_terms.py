"""A term of the loss that is made of a gradient has a gradient itself.

Relation: where `torch.autograd.grad` is called in a step, with gradients enabled, by something that is no parameter (a point,
an input), and its result requires no gradient, numbers that are made of it by norms, powers, means and regression losses of
torch are not added to one number that requires a gradient. Tolerance none. Reported as a warning.
Usually caused by a gradient penalty, a residual of a differential equation or a force whose `create_graph=True` is missing: the
term is a constant then, and counts in the reported loss while it trains nothing. Inputs that are moved along a gradient
(adversarial examples), weights that are multiplied with a loss, and gradients of parameters are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, without_gradient

COST = frozenset({"host"})
OBSERVERS = frozenset({"gradient_terms", "updates"})
STAGE = "forward"


@dataclass(frozen=True, slots=True)
class ConstantTerm:
    """A term of a loss that was made of a gradient without a graph."""

    parameter: str = ""
    """One on which the term depends; empty where there is no such term."""


def check(evidence: Evidence) -> list[Finding]:
    """Find a term that is a constant."""
    name = evidence.of(ConstantTerm).parameter
    text = (
        "a term of a loss is made of a gradient that torch.autograd.grad returned without create_graph=True. It is a constant, "
        f"and does not train {name}, on which it depends"
    )
    hint = "call torch.autograd.grad(..., create_graph=True) for a penalty or residual that is to be trained"
    return without_gradient(evidence, text, name, hint)
