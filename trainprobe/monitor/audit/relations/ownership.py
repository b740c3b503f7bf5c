"""The optimizer owns every trainable parameter of the model.

Relation: the optimizers step every parameter object of the model that requires a gradient. Excepted are parameters that other
ranks of the replica group step and hand over, parameters that the program updates by hand within the step, a copy of a trained
module that gets no gradient, such as a moving average, and a teacher, which runs with gradients disabled. Tolerance none. A
parameter has a master weight if an optimizer holds a tensor of its shape and a different dtype. If an optimizer holds no
parameter and nothing that resembles one, nothing is known. Parameters in a plain list or dict of a module are not registered.
Such a parameter is reported if it has a gradient and no optimizer holds it.
Usually caused by parameters that were replaced (moved, cast, resized, wrapped) after the optimizer was made (accelerate issue
2665), by a part of the model that is missing from the parameter groups, or by a list in place of `nn.ModuleList`.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.untrained import untrained_parameters

COST = frozenset({"host"})
OBSERVERS = frozenset({"model_calls", "updates"})
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find trainable parameters that no optimizer steps."""
    return [*_hidden(evidence), *_lost(evidence)]


def _hidden(evidence: Evidence) -> list[Finding]:
    hidden = evidence.model.hidden
    if not hidden or not evidence.of(UpdateCounts).updates:
        return []
    text = (
        f"{and_more(list(hidden))} has a gradient and is no parameter of the model, as a plain list or dict holds it. No "
        "optimizer steps it, no checkpoint saves it"
    )
    hint = "keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList or nn.ParameterDict"
    return [evidence.found(text, hidden, next=hint, measured="not owned", expected="owned", severity="error")]


def _lost(evidence: Evidence) -> list[Finding]:
    beside = untrained_parameters(evidence)
    trainable = [p for p in evidence.model.parameters if p.trainable and p.name not in beside]
    elsewhere = evidence.mastered | evidence.history.handed_over | evidence.of(UpdateCounts).by_hand
    lost = [p for p in trainable if p.owned is False and p.name not in elsewhere]
    strays = set(evidence.model.strays)
    stale = [p for p in lost if (p.shape, p.dtype) in strays]
    if not lost or not evidence.of(UpdateCounts).updates or (len(lost) == len(trainable) and not stale):
        return []
    names = [p.name for p in (stale or lost)]
    held = len(trainable) - len(lost)
    text = f"the optimizer owns {held} of {len(trainable)} live trainable parameters: it never updates {and_more(names)}"
    if stale:
        text += ". It holds old tensors of the same shapes: the parameters were replaced after it was made"
    hint = "make the optimizer after the model has its final dtype, device and wrappers, from model.parameters()"
    return [evidence.found(text, names, next=hint, measured=float(held), expected=float(len(trainable)), severity="error")]
