"""Features that are gathered over the ranks and enter a product with a gradient have a gradient themselves.

Relation: `torch.distributed.all_gather` is called in training, with gradients enabled, on a matrix that requires a gradient.
Its result, alone or joined with others like it, is then not an operand of a matrix product whose other operand requires a
gradient. Tolerance none. Reported as a warning, because the gathered features may be meant as constants. For
`all_gather_into_tensor` torch itself warns.
Usually caused by a contrastive loss over all ranks: `all_gather` has no backward pass, so the features count as constants where
they are the negatives and positives of others, and half of the gradient is missing. A loss cannot violate this if it puts the
rank's own features back before it joins them, gathers under `no_grad` or from detached tensors, or uses
`torch.distributed.nn.functional`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, without_gradient

COST = frozenset({"host"})
OBSERVERS = frozenset({"gathered_features", "updates"})
STAGE = "forward"


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A tensor that was gathered over the ranks without its gradient, and then multiplied with one that has a gradient."""

    parameter: str = ""
    """One on which the tensor depends; empty where there is no such tensor."""


def check(evidence: Evidence) -> list[Finding]:
    """Find what was gathered without its gradient."""
    name = evidence.of(GatheredTensor).parameter
    text = (
        f"what all_gather brought of a tensor that depends on {name} has no gradient, on any rank, and is multiplied with one "
        "that has one. The gradient through it is missing"
    )
    hint = "gather with torch.distributed.nn.functional.all_gather, or put this rank's own tensor back among those gathered"
    return without_gradient(evidence, text, name, hint)
