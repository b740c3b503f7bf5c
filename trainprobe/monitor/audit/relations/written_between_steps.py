"""A weight that only the optimizer writes is not written between two steps.

Relation: a few elements of each weight are unchanged from its last update to the start of the next one, at every step, audited
or not. Judged for weights that were unchanged between at least eight pairs of updates before, and reported once a weight.
Loading a state dict is no write. Weights that two optimizers step, or that a schedule-free optimizer converts, are left out, as
are elements outside the sample. Under ZeRO 1 and 2 and Megatron's optimizers the copy that each rank holds of the gathered
weights is judged. Tolerance: four units of the format, which a write that is taken back leaves (sharpness-aware minimisation);
zero for gathered copies. Reported as a warning. Reported as info if the program probably intends it: merged adapters, so that
half of the written weights are now zero (ReLoRA), or more than half of an optimizer's weights at once on ranks that train
separately (local SGD). Under DistributedDataParallel, and where a framework gathers weights, all ranks are equal before the
write too, so it is no average. If an optimizer steps between the two updates for the first time, the write is the program's own
(DiLoCo).
Usually caused by an in-place change, by weights of another run or an average that were copied in, or by corrupted memory.
If two consecutive steps are audited, `untouched_between_steps` checks every element and the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"weight_samples"})
STAGE = "evaluation"
PYTORCH_ONLY = "what is written between two updates is known by PyTorch's hooks around them"


@dataclass(frozen=True, slots=True)
class Write:
    """Weights that were written between the updates of two steps. of: how many were looked at. merged: as adapters are.

    copies: whether a wrapper keeps the weights of all ranks equal, so that there is nothing to average.
    """

    after: int
    before: int
    names: tuple[str, ...]
    of: int
    merged: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class RestingWeights:
    """Writes to weights since the last audited step."""

    writes: tuple[Write, ...] = ()
    """Those to weights that were at rest before."""


def check(evidence: Evidence) -> list[Finding]:
    """Find weights that were written between two updates."""
    return [_finding(evidence, write) for write in evidence.of(RestingWeights).writes]


def _finding(evidence: Evidence, write: Write) -> Finding:
    text = (
        f"the weight of {and_more(list(write.names), write.of)} changed between the updates of steps {write.after} and "
        f"{write.before}: something else than the optimizer wrote to it"
    )
    hint = (
        "look for a copy, an average, a reset or an in-place change behind that step. If it is meant, leave the relation out "
        "(`audit: {relations: {written_between_steps: false}}`)"
    )
    averaged = evidence.place.world_size > 1 and not write.copies and 2 * len(write.names) > write.of
    severity = "info" if write.merged or averaged else "warning"
    found = evidence.found(text, write.names, next=hint, measured="changed", expected="unchanged", severity=severity)
    return replace(found, step=write.before)
