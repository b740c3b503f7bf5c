"""Adapters that are active in a training are trained.

Relation: where modules hold adapters on top of a base layer (PEFT) that are active, switched on and not merged into it, and an
update is made, a parameter of at least one of these adapters requires a gradient. Tolerance none. Reported as a warning, as a
frozen adapter may be meant.
Usually caused by an adapter that is loaded for inference, which is the default (`PeftModel.from_pretrained` without
`is_trainable=True`), so that only what else is trained moves, or by a loop that freezes what it does not know by name.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts

COST = frozenset({"host"})
OBSERVERS = frozenset({"updates"})
STAGE = "set-up"
PYTORCH_ONLY = "adapters are known of PEFT, which is for PyTorch"


def check(evidence: Evidence) -> list[Finding]:
    """Find a model whose active adapters are all frozen."""
    active = [p for p in evidence.model.parameters if p.name in evidence.model.adapters]
    if not active or not evidence.of(UpdateCounts).updates or any(p.trainable or p.owned for p in active):
        return []
    names = [p.name for p in active]
    text = (
        f"all active adapters are frozen while other parameters are trained: {and_more(names, len(evidence.model.parameters))} "
        "requires no gradient and never moves"
    )
    hint = "load the adapter for training (PeftModel.from_pretrained(..., is_trainable=True)), before the optimizer is made"
    return [evidence.found(text, names, next=hint, measured="frozen", expected="trained")]
