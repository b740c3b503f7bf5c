"""Every parameter of a module that ran gets a gradient.

Relation: where a module ran in training, the optimizer that steps holds its parameters, and they require a gradient, they have
one when it steps. Reported at once where they had one at each of the audited steps before, of which there were three or more;
and where they never had one although the module ran with gradients enabled. A gradient that is all zeros is none where it was
not at the audited step before and that of another parameter of the module is not; a bias counts only where the model ran once.
What the program takes away between backward and update is reported only where it was not at three audited steps before.
Tolerance none. Experts and layers that did not run are not judged.
Usually caused by a `detach`, an `item`, an index or a `no_grad` between the module and the loss, or by an output that the loss
does not use: the parameters then never train, and no number looks wrong.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.history import STEADY

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"gradient_use", "model_calls"})
STAGE = "backward"
_HINT = "look for detach, no_grad or an unused output after this module, or remove it from the optimizer"
PYTORCH_ONLY = "MindSpore hands zeros to the optimizer where no gradient arrives"


def check(evidence: Evidence) -> list[Finding]:
    """Find parameters that no gradient reached although their module ran."""
    model_calls = evidence.of(TrainingCalls)
    gradients = evidence.of(UsedGradients)
    if not gradients.reached or not model_calls.called:
        return []
    ran = [name for name in gradients.unreached if name.rpartition(".")[0] in model_calls.called]
    known: dict[str, int] = evidence.remembered("reached_parameters", {})
    always = [name for name, times in known.items() if times >= STEADY]
    lost = [name for name in ran if name in always]
    lost += [name for name in always if _is_masked(evidence, name)]
    never = [name for name in ran if name not in known and model_calls.called[name.rpartition(".")[0]]]
    if lost:
        text = (
            f"no gradient reaches {and_more(lost)} any more, though its module ran and it had one at each audited step before"
        )
        return [_finding(evidence, text, lost, "error")]
    if removed := [name for name in gradients.removed if name in always]:
        text = f"the gradient of {and_more(removed)} is removed before the update, and was used at each audited step before"
        hint = "look for zero_grad or `.grad = None` between backward and update"
        return [_finding(evidence, text, removed, "error", hint)]
    if never:
        text = f"no gradient reaches {and_more(never)}, though its module ran and the optimizer holds it: it never trains"
        return [_finding(evidence, text, never, "warning")]
    return []


def remember(evidence: Evidence) -> dict[str, int]:
    """Return parameter → audited steps in a row at which it had a gradient; -1 once it had none."""
    known: dict[str, int] = evidence.remembered("reached_parameters", {})
    gradients = evidence.of(UsedGradients)
    now = known | {
        name: known[name] + 1 if known.get(name, 0) > 0 else 1 for name in gradients.reached if known.get(name) != -1
    }
    return now | dict.fromkeys(now.keys() & {*gradients.unreached, *gradients.removed}, -1)


def _is_masked(evidence: Evidence, name: str) -> bool:
    """Tell whether a gradient became all zeros by itself."""
    seen, before = evidence.tensors, evidence.before
    if seen.number(name, "grad", "absmax") != 0 or before is None or not before.tensors.number(name, "grad", "absmax") > 0:
        return False
    if len(evidence.batches) > 1 and _dimensions(evidence, name) < 2:  # sums over calls may cancel, as in a Wasserstein critic
        return False
    module = name.rpartition(".")[0]
    siblings = (n for n in seen.names if n != name and n.rpartition(".")[0] == module)
    return any(seen.number(other, "grad", "absmax") > 0 for other in siblings)


def _dimensions(evidence: Evidence, name: str) -> int:
    return next((len(p.shape) for p in evidence.model.parameters if p.name == name), 0)


def _finding(evidence: Evidence, text: str, names: list[str], severity: str, hint: str = _HINT) -> Finding:
    return evidence.found(text, names, "grad", next=hint, measured="no gradient", expected="a gradient", severity=severity)
