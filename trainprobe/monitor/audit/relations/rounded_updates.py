"""Updates do not round away in weights of 16 bits.

Relation: of the change that the rule of torch's Adam, AdamW or SGD gives, summed over the elements of all weights of 16 bits of
a parameter group that were worked out again, less than half belongs to elements that stayed as they were, at one of two steps
in a row at which this is looked at. Groups whose rate is still rising, or below a tenth of its largest, are not judged.
Reported as a warning.
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
STAGE = "update"
_MOST = 0.5
_LOW_RATE = 0.1  # of the largest: at the end of a schedule the last small updates may be lost


def check(evidence: Evidence) -> list[Finding]:
    """Find the parameter group whose weights stay most as they are because their updates are too small for their format."""
    now, before, peaks = remember(evidence), evidence.remembered("rounded_updates", {}), evidence.history.peaks
    judged = {
        group: share
        for group, (share, rate) in now.items()
        if share >= _MOST
        and group in before
        and before[group][0] >= _MOST
        and rate <= before[group][1]
        and rate >= _LOW_RATE * (peaks[group] if group < len(peaks) else 0.0)
    }
    groups, reruns = evidence.of(UsedGroups).groups, [r for r in evidence.of(Reruns).reruns if r.total]
    if not judged or not reruns:
        return []
    worst = max(judged, key=lambda group: judged[group])
    own = [r for r in reruns if len(groups) < 2 or r.name in groups[worst].names]
    names = [r.name for r in sorted(own, key=lambda r: r.lost / r.total, reverse=True) if r.lost >= _MOST * r.total]
    dtype = evidence.tensors.dtypes.get((names[0], "value"), "16 bits")
    text = (
        f"{judged[worst]:.0%} of the update{' of a parameter group' if len(groups) > 1 else ''} rounds away in {dtype} for "
        f"{and_more(names, len(own))}. At the rate {now[worst][1]:.3g} it is less than half of the distance to the next number"
    )
    hint = "keep the weights in float32 and compute under autocast, or use an optimizer with master weights of float32"
    return [evidence.found(text, names, "update", next=hint, measured=judged[worst], expected=f"below {_MOST:g}", floor=_MOST)]


def remember(evidence: Evidence) -> dict[int, tuple[float, float]]:
    """Return which share of the update of each group was lost when it was last looked at, and its rate then."""
    reruns = [r for r in evidence.of(Reruns).reruns if r.total > 0]
    known: dict[int, tuple[float, float]] = evidence.remembered("rounded_updates", {})
    if not reruns or not evidence.of(UpdateCounts).once:
        return known
    groups, rates = evidence.of(UsedGroups).groups, evidence.of(UsedGroups).rates
    found = dict(known)
    for i, rate in enumerate(rates):
        own = [r for r in reruns if len(groups) < 2 or (i < len(groups) and r.name in groups[i].names)]
        if own:
            found[i] = sum(r.lost for r in own) / sum(r.total for r in own), rate
    return found
