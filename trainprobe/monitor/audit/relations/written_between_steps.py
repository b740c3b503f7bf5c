"""A weight that nothing but the optimizer writes is not written between two steps.

Relation: a few elements of each weight are what its last update left when the next one begins, at every step, audited or not.
Judged of weights that were at rest between at least eight pairs of updates before; told once of a weight. Loading a state dict
is no write, and weights that two optimizers step, or that a schedule-free one turns into others and back, are left out. So are
elements that are not in the sample. Tolerance four units of the format, which a write that is taken back leaves
(sharpness-aware minimisation). Reported as a warning, and as info of what programs do with a period: adapters that are merged,
so that half of the written weights are zero now (ReLoRA), and, with several ranks that train apart, more than half of an
optimizer's weights at once (local SGD). Under DistributedDataParallel all ranks are equal before such a write too, so that it
is no average. Where another optimizer has stepped between the two updates that had not done so before, the write is its
program's own (DiLoCo).
Usually caused by an in-place change, weights of another run or an average that were copied in, or by corrupted memory.
Where two audited steps follow each other, `untouched_between_steps` looks at every element and at the optimizer's state.
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
