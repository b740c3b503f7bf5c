"""A frozen part has no moving statistics and no active dropout.

Relation, for what was frozen at set-up, is frozen now and has not changed since the audited step before (so that nothing moves
it, as a moving average would be): the running statistics of a normalisation layer with frozen parameters do not change between
the first forward pass of a step and its update. The same holds for a layer without parameters in a module whose parameters are
all frozen. A dropout in such a module is not active while the module runs without gradients (a teacher, a reference, a fixed
encoder). Dropout in a frozen part through which gradients flow is allowed: adapters are trained like that. Tolerance none.
Reported as a warning.
Usually caused by `requires_grad_(False)` without `eval()`, or by a later `model.train()` that includes the frozen part. Its
outputs then drift, or are random, though no weight changes. A frozen part in evaluation mode cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"buffers", "model_calls", "updates"})
STAGE = "forward"
_STATISTICS = ("running_mean", "running_var")


def check(evidence: Evidence) -> list[Finding]:
    """Find statistics that move in frozen parts, and dropout that is active in them."""
    buffers = evidence.of(BufferStates)
    still = _still(evidence)
    if not still or len(still) == len(evidence.model.parameters) or not evidence.of(UpdateCounts).updates:
        return []
    moved = [
        name for name, was in buffers.begun.items() if name.endswith(_STATISTICS) and buffers.updated.get(name, was) != was
    ]
    moved = [name for name in moved if _is_frozen(evidence, name.rpartition(".")[0], still)]
    if moved:
        text = f"{and_more(moved)} moves, though the parameters around it are frozen. These layers are in training mode"
        return [_finding(evidence, text, moved, "buffer", "buffer")]
    ran = {name for name, with_gradients in evidence.of(TrainingCalls).called.items() if not with_gradients}
    awake = [name for name in sorted(evidence.model.dropouts) if name in ran and _is_frozen(evidence, name, still)]
    if awake:
        text = f"dropout {and_more(awake)} is active in frozen layers that run without gradients: their outputs are random"
        return [_finding(evidence, text, awake, "mode", "module")]
    return []


def _still(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that have been frozen since set-up and have not moved since the audited step before."""
    before, seen = evidence.before, evidence.tensors
    if before is None:
        return frozenset()
    begun = {p.name for p in evidence.set_up.parameters if not p.trainable}
    frozen = (p.name for p in evidence.model.parameters if not p.trainable and p.name in begun)
    same = ((name, before.tensors.checksum(name, "value_after"), seen.checksum(name, "value")) for name in frozen)
    return frozenset(name for name, was, now in same if was is not None and was == now)


def _is_frozen(evidence: Evidence, module: str, still: frozenset[str]) -> bool:
    """Tell whether the parameters of a module, or of the first around it that has any, all stand still."""
    while True:
        inside = [p.name for p in evidence.model.parameters if not module or p.name.startswith(f"{module}.")]
        if inside or not module:
            return bool(inside) and still.issuperset(inside)
        module = module.rpartition(".")[0]


def _finding(evidence: Evidence, text: str, names: list[str], slot: str, kind: str) -> Finding:
    hint = "call eval() on the frozen layers, after every model.train()"
    return evidence.found(text, names, slot, next=hint, measured="alive", expected="at rest", kind=kind)
