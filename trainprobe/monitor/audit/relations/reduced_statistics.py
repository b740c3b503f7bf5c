"""Statistics of what has a gradient, summed over the ranks, keep the gradient where a module uses them.

Relation, at two audited steps in a row, in the training forward of a module without buffers: what `all_reduce` is given, as
numbers without a gradient, is not the mean or the sum over all dimensions but one of an input of the module that has a
gradient. Equal to 1e-5 of the largest. Reported as a warning, as such numbers may be meant for the record alone.
Usually caused by a batch normalisation over all ranks that is written by hand and sums detached moments: the gradient through
the mean and the variance is missing. `torch.distributed.nn.functional.all_reduce` and `SyncBatchNorm` cannot violate this.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"reduced_statistics"})
STAGE = "forward"
PYTORCH_ONLY = "what is summed over the ranks is set against what modules are given by torch"


@dataclass(frozen=True, slots=True)
class ReducedStatistics:
    """A module that summed statistics of its input over the ranks without their gradient."""

    module: str = ""
    """Its name; empty where there is none."""


def check(evidence: Evidence) -> list[Finding]:
    """Find the first module that does, as at the audited step before."""
    name, before = evidence.of(ReducedStatistics).module, evidence.before
    if not name or before is None or before.of(ReducedStatistics).module != name:
        return []
    text = (
        f"{name} sums statistics of its input over the ranks, and what comes back has no gradient: the gradient through these "
        "statistics is missing"
    )
    hint = "reduce with torch.distributed.nn.functional.all_reduce, or use torch.nn.SyncBatchNorm"
    return [evidence.found(text, name, "output", next=hint, measured="no gradient", expected="a gradient", kind="module")]
