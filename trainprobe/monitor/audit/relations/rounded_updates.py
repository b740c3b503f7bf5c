"""Updates do not round away in weights of 16 bits.

Relation: of the change that the rule of torch's Adam, AdamW or SGD gives, summed over the elements of all weights of 16 bits
that were worked out again, less than half belongs to elements that stayed as they were, at one of two steps in a row at which
this is looked at. Steps at which the learning rate is still rising, or below a tenth of its largest, are not judged. Reported
as a warning.
Usually caused by a model that was made bfloat16 as a whole (`model.bfloat16()`, `torch_dtype=torch.bfloat16`) and is trained
at a small rate: a number of bfloat16 has eight bits, so a change below about 1/256 of a weight is lost, and with it most of the
training. Weights of float32 under autocast, and an optimizer with master weights, cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import Reruns, UpdateCounts, UsedGroups

COST = frozenset({"rerun"})
OBSERVERS = frozenset({"parameter_groups", "update_rules", "updates"})
EVERY = 50
STAGE = "update"
_MOST = 0.5
_LOW_RATE = 0.1  # of the largest: at the end of a schedule the last small updates may be lost


def check(evidence: Evidence) -> list[Finding]:
    """Find weights that stay as they are because their updates are too small for their format."""
    share, rate = remember(evidence)
    reruns = evidence.of(Reruns).reruns
    before, rate_before = evidence.remembered("rounded_updates", (0.0, 0.0))
    if not reruns or not share >= _MOST or not before >= _MOST or rate > rate_before:
        return []
    if rate < _LOW_RATE * max(evidence.history.peaks, default=0.0):
        return []
    worst = sorted((r for r in reruns if r.total), key=lambda r: r.lost / r.total, reverse=True)
    names = [r.name for r in worst if r.lost >= _MOST * r.total]
    dtype = evidence.tensors.dtypes.get((names[0], "value"), "16 bits")
    text = (
        f"{share:.0%} of the update rounds away in {dtype} for {and_more(names, len(reruns))}. At the rate {rate:.3g} it is "
        "less than half of the distance to the next number"
    )
    hint = "keep the weights in float32 and compute under autocast, or use an optimizer with master weights of float32"
    return [
        evidence.finding(
            "rounded_updates",
            text,
            names[0],
            "update",
            measured=share,
            expected=f"below {_MOST:g}",
            floor=_MOST,
            severity="warning",
            next=hint,
            names=names,
        )
    ]


def remember(evidence: Evidence) -> tuple[float, float]:
    """Return which share of the update was lost when it was last looked at, and the largest rate then."""
    reruns = [r for r in evidence.of(Reruns).reruns if r.total > 0]
    if not reruns or not evidence.of(UpdateCounts).once:
        return evidence.remembered("rounded_updates", (0.0, 0.0))
    return sum(r.lost for r in reruns) / sum(r.total for r in reruns), max(evidence.of(UsedGroups).rates, default=0.0)
