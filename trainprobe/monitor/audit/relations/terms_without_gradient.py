"""A reported number that is a term of the loss brings a gradient.

Relation, at four audited steps in a row: the loss of the step's first backward pass less what loss functions of torch returned
is not c times a reported number, with one c, while that number varies, unless a term for it with a gradient is among those that
are added up last. That is: as many terms have a gradient as there were loss functions, and at least one has none. Tolerance of
c: 1e-4, or 16 units of rounding of the loss if that is more. Numbers that vary by less than 20 times that are not judged.
Reported as a warning.
Usually caused by an auxiliary loss that is detached or worked out under `no_grad` (Automodel issue 1408: a balance of experts):
it counts in the reported loss, and trains nothing.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import DependentScalars, LossCalls
from trainprobe.monitor.audit.facts.gradients import LossGraphs, UsedGradients
from trainprobe.monitor.scalar_names import role_of

COST = frozenset({"host"})
OBSERVERS = frozenset({"gradient_use", "loss_graph", "loss_inputs", "noted_scalars"})
STAGE = "backward"
PYTORCH_ONLY = "it is read from torch's autograd graph, and MindSpore shows no graph"
_LOOKS = 4
_TOLERANCE, _UNITS = 1e-4, 16 * 2.0**-23
Seen: TypeAlias = tuple[float, dict[str, tuple[float, float]]]  # the tolerance, and reported number → (it, the term by it)


def remember(evidence: Evidence) -> list[Seen]:
    """Return what the last audited steps have shown, at most three of them."""
    return _series(evidence)[-_LOOKS + 1 :]


def check(evidence: Evidence) -> list[Finding]:
    """Find a reported number that is a term without a gradient."""
    series = _series(evidence)
    if len(series) < _LOOKS:
        return []
    tolerance = max(allowed for allowed, _ in series)
    for name in series[-1][1]:
        both = [seen[name] for _, seen in series if name in seen]
        numbers, factors = [number for number, _ in both], [factor for _, factor in both]
        if len(both) < _LOOKS or _spread(factors) > tolerance or _spread(numbers) < 20 * tolerance:
            continue
        text = (
            f"the loss holds {factors[-1]:.4g} times the reported {name}, which has no gradient there: it counts in the loss "
            "and trains nothing"
        )
        hint = "add the tensor itself to the loss, with its graph; leave it out if it is for the record alone"
        return [evidence.found(text, name, next=hint, measured="no gradient", expected="a gradient", kind="scalar")]
    return []


def _series(evidence: Evidence) -> list[Seen]:
    """Return what the last four audited steps have shown, up to one that shows nothing."""
    before: list[Seen] = evidence.remembered("terms_without_gradient", [])
    graph, roots = evidence.of(LossGraphs), evidence.of(UsedGradients).differentiated
    values = [call.number("value") for call in evidence.of(LossCalls).losses if call.backward == 0]
    if not roots or not values or graph.graded != len(values) or not graph.ungraded:
        return []
    rest = roots[0] - math.fsum(values)
    if not math.isfinite(rest) or rest == 0:
        return []
    graded = evidence.of(DependentScalars).names
    plain = {n: x for n, x in evidence.scalars.items() if n not in graded and role_of(n) is None and x and math.isfinite(x)}
    allowed = max(_TOLERANCE, _UNITS * abs(roots[0] / rest))
    return [*before, (allowed, {name: (number, rest / number) for name, number in plain.items()})][-_LOOKS:]


def _spread(numbers: list[float]) -> float:
    return (max(numbers) - min(numbers)) / max(map(abs, numbers))
