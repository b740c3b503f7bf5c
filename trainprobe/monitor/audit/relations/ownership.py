"""The optimizer owns every live trainable parameter.

Relation: the set of parameter objects that the optimizers step contains every parameter of the model that requires a gradient,
but for those that other ranks of its replica group step and hand over, those that the program updates by hand within the step,
and a copy beside a trained module, such as a moving average, which gets no gradient. Tolerance none. One of which an optimizer
holds a copy of its shape and another dtype has a master weight; where an optimizer holds none of them and nothing that looks
like them, nothing is known. Parameters that a module keeps in a plain list or dict are no parameters of the model: where one of
them has a gradient and no optimizer holds it, it is reported.
Usually caused by parameters that were replaced (moved, cast, resized, wrapped) after the optimizer was made (accelerate issue
2665), by a part of the model that was left out of the parameter groups, or by a list where `nn.ModuleList` is meant.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.untrained import untrained_parameters

COST = frozenset({"host"})
OBSERVERS = frozenset({"updates"})
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
