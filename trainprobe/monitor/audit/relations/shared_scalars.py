"""Learning rate, number of updates and step counter are the same on all ranks.

Relation: ranks that differ only in dp, cp or tp have equal learning rates, update as often in a step, and count the
same number of steps. Ranks of a tp group whose losses were equal at the audited step before report equal losses, and so do
ranks that differ in dp or cp too and whose losses were equal at three audited steps in a row. Tolerance zero. Loss scales have
a relation of their own, `shared_scale`.
Usually caused by a scheduler or a skipped step that depends on something one rank alone sees (its own loss, its own
overflow), and by a report that is not averaged over the ranks any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words

COST = frozenset({"ranks"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "rate"
AXES = frozenset({"dp", "cp", "tp"})
STEADY = 3
_NAMES = {"lr": "learning rates", "updates": "numbers of updates", "counter": "step counters"}


def check(evidence: Evidence) -> list[Finding]:
    """Find scalars that differ between ranks."""
    found = [unequal(evidence, name, words) for name, words in _NAMES.items()]
    return [finding for finding in found if finding is not None] + _losses(evidence)


def unequal(evidence: Evidence, name: str, words: str) -> Finding | None:
    """Return the finding that a number differs between ranks that differ only in dp, cp or tp."""
    group = along(evidence, AXES)
    values = {peer.rank: peer.numbers[name] for peer in group if peer.numbers[name] == peer.numbers[name]}
    if len(set(values.values())) < 2:
        return None
    text = f"the {words} differ in the {group_words(evidence, AXES, group)}: {_listed(values)}"
    mine = values.get(evidence.place.rank)
    return evidence.found(text, name, measured=mine, expected="equal on all ranks", kind="scalar", severity="error")


def remember(evidence: Evidence) -> int:
    """Return at how many audited steps in a row all ranks that differ only in dp, cp or tp have reported one loss."""
    return evidence.remembered("shared_scalars", 0) + 1 if _agree(evidence) else 0


def _agree(evidence: Evidence) -> bool:
    losses = [peer.numbers["loss"] for peer in along(evidence, AXES)]
    return len(losses) > 1 and len(set(losses)) == 1  # NaN is not equal to itself, and so is no agreement


def _listed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.9g} on rank {rank}" for rank, value in list(values.items())[:4])


def _losses(evidence: Evidence) -> list[Finding]:
    """Find losses that came apart. Each rank may report that of its own data or tokens, and then always did."""
    axes = AXES if evidence.remembered("shared_scalars", 0) >= STEADY else frozenset({"tp"})
    group = along(evidence, axes)
    before = {peer.rank: peer.numbers["loss"] for peer in evidence.before.peers} if evidence.before is not None else {}
    values = {peer.rank: peer.numbers["loss"] for peer in group}
    numbers = [*values.values(), *(before.get(rank, float("nan")) for rank in values)]
    if any(number != number for number in numbers) or len(set(values.values())) < 2:
        return []
    if len({before[rank] for rank in values}) > 1:
        return []
    text = (
        f"the reported losses differ in the {group_words(evidence, axes, group)}, where they were equal at each audited "
        f"step before: {_listed(values)}"
    )
    mine = values.get(evidence.place.rank)
    return [evidence.found(text, "loss", measured=mine, expected="equal on all ranks", kind="scalar", severity="error")]
