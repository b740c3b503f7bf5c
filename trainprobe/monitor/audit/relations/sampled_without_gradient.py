"""Samples that a model draws in training let gradients through, or are trained by their log-probability.

Relation: in a step with an update, what the model draws in its forward, in training and with gradients enabled, from a
distribution of torch whose numbers depend on trainable parameters and that can let gradients through (`has_rsample`), is drawn
by `rsample`; unless the log-probability of something is taken in the step, as policies do. Tolerance none. Reported as a
warning.
Usually caused by `sample()` in a variational autoencoder: the encoder is then trained by the divergence alone, which no number
but the quality of the result shows. What is drawn under `no_grad` (rollouts, pictures for the eye), from discrete
distributions, or outside of the model cannot violate this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, without_gradient

COST = frozenset({"host"})
OBSERVERS = frozenset({"samples", "updates"})
STAGE = "forward"


@dataclass(frozen=True, slots=True)
class SampledWithoutGradient:
    """Samples that let no gradient through, in a step that took no log-probability."""

    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Class of a distribution → a parameter that it depends on."""


def check(evidence: Evidence) -> list[Finding]:
    """Find samples without a gradient."""
    kind, name = next(iter(evidence.of(SampledWithoutGradient).parameters.items()), ("", ""))
    text = (
        f"the model draws with {kind}.sample(), through which no gradient reaches {name}, although {kind} depends on it and no "
        "log-probability is taken in this step"
    )
    hint = "draw with rsample(); or, if the sample is meant to be a constant, draw it under torch.no_grad()"
    return without_gradient(evidence, text, name, hint, measured="sample()", expected="rsample()")
