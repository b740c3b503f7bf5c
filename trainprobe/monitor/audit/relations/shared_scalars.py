"""Learning rate, loss scale, number of updates and step counter are the same on all ranks.

Relation: ranks that differ only in dp, cp or tp have equal learning rates and loss scales, update as often in a step, and
count the same number of steps. Ranks of a tp group whose losses were equal at the audited step before report equal losses.
Tolerance zero.
Usually caused by a scheduler, a scaler or a skipped step that depends on something one rank alone sees (its own loss, its own
overflow).
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words

COST = frozenset({"ranks"})
EVERY = 10
STAGE = "rate"
_TOLD = {"lr": "learning rates", "loss_scale": "loss scales", "updates": "numbers of updates", "counter": "step counters"}


def check(evidence: Evidence) -> list[Finding]:
    """Find scalars that differ between ranks."""
    axes = frozenset({"dp", "cp", "tp"})
    group = along(evidence, axes)
    found: list[Finding] = []
    for name, words in _TOLD.items():
        values = {peer.rank: peer.numbers[name] for peer in group if peer.numbers[name] == peer.numbers[name]}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value:.9g} on rank {rank}" for rank, value in list(values.items())[:4])
            text = f"the {words} differ in the {group_words(evidence, axes, group)}: {told}"
            mine = values.get(evidence.place.rank)
            found.append(
                evidence.finding("shared_scalars", text, name, measured=mine, expected="equal on all ranks", kind="scalar")
            )
    return found + _losses(evidence)


def _losses(evidence: Evidence) -> list[Finding]:
    """Find losses of one tp group that came apart. Each rank may report that of its own tokens, and then always did."""
    axes = frozenset({"tp"})
    group = along(evidence, axes)
    before = {peer.rank: peer.numbers["loss"] for peer in evidence.before.peers} if evidence.before is not None else {}
    values = {peer.rank: peer.numbers["loss"] for peer in group}
    numbers = [*values.values(), *(before.get(rank, float("nan")) for rank in values)]
    if any(number != number for number in numbers) or len(set(values.values())) < 2:
        return []
    if len({before[rank] for rank in values}) > 1:
        return []
    told = ", ".join(f"{value:.9g} on rank {rank}" for rank, value in list(values.items())[:4])
    text = f"the losses came apart in the {group_words(evidence, axes, group)}, which computes one model together: {told}"
    mine = values.get(evidence.place.rank)
    return [evidence.finding("shared_scalars", text, "loss", measured=mine, expected="equal on all ranks", kind="scalar")]
