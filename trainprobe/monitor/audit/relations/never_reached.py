"""Every trainable parameter of an optimizer gets a gradient at some step.

Relation: consider a parameter that requires a gradient, that an optimizer holds, and whose module ran in training mode in this
step. It had a gradient at one of the audited steps, of which four or more had an update. `reached_parameters` judges modules
that ran with gradients enabled; here the module ran without, so no single step looks wrong. Modules that did not run (heads of
other tasks, experts) and modules in evaluation mode are left out. Tolerance none. Reported as a warning: a part that only
`no_grad` freezes may be intended.
Usually caused by `torch.no_grad` or `inference_mode` around a part of the model that should be trained, left over from a frozen
phase or from a decorator on its forward. A part that is frozen with `requires_grad_(False)`, or that no optimizer holds, cannot
violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.gradients import UsedGradients

COST = frozenset({"host"})
OBSERVERS = frozenset({"gradient_use", "model_calls", "updates"})
STAGE = "backward"
_LOOKS = 4


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that run without gradients at each step."""
    never = [name for name in evidence.of(UsedGradients).unreached if _is_judged(evidence, name)]
    if not never:
        return []
    text = (
        f"{and_more(never)} requires a gradient and is held by the optimizer, but its module runs with gradients disabled. It "
        f"has got no gradient in {_LOOKS} audited steps and never trains"
    )
    hint = "remove the no_grad around it, or freeze it with requires_grad_(False) and leave it out of the optimizer"
    return [evidence.found(text, never, "grad", next=hint, measured="no gradient", expected="a gradient")]


def remember(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that have had a gradient."""
    return _reached(evidence) | evidence.of(UsedGradients).reached


def _reached(evidence: Evidence) -> frozenset[str]:
    return evidence.remembered("never_reached", frozenset[str]())


def _is_judged(evidence: Evidence, name: str) -> bool:
    known = evidence.history.streaks.get(("unreached", name))
    if known is None or known.count + 1 < _LOOKS or name in _reached(evidence):
        return False
    return evidence.of(TrainingCalls).called.get(name.rpartition(".")[0] or "root") is False
