"""Which ranks of two packs face each other, and what is missing before anything is compared."""

from __future__ import annotations

from collections.abc import Iterator

from trainprobe.config_check.compare.verdicts import Check, PackFinding
from trainprobe.config_check.pack import Pack, RankPack
from trainprobe.engine.core.words import numbered

BENCH, CMP = "bench", "cmp"


def common_ranks(bench: Pack, cmp: Pack) -> list[int]:
    """Return the ranks that both packs hold."""
    return sorted(set(bench.ranks) & set(cmp.ranks))


def rank_pairs(bench: Pack, cmp: Pack, capture: str) -> Iterator[tuple[int, RankPack, RankPack]]:
    """Yield the ranks in which both packs hold a capture."""
    for rank in common_ranks(bench, cmp):
        if bench.ranks[rank].has(capture) and cmp.ranks[rank].has(capture):
            yield rank, bench.ranks[rank], cmp.ranks[rank]


def absent(name: str, columns: tuple[str, ...], bench: Pack, cmp: Pack) -> Check | None:
    """Return the check as far as it can be told when a side does not have this capture, else None.

    Missing on both sides is told and passes only where neither was asked for it.
    """
    has = bench.has(name), cmp.has(name)
    if all(has):
        return None
    if not any(has):
        asked = name in bench.captures and name in cmp.captures
        missing = (PackFinding("warning", f"{name}: captured on neither side", f"missing {name}"),) if asked else ()
        return Check(name, columns, findings=missing, compared=False)
    side, lacking = (CMP, cmp) if has[0] else (BENCH, bench)
    if bench.origin != cmp.origin and lacking.origin != "trainprobe":
        text = f"{name}: not compared, as the pack of {lacking.origin} holds none"
        return Check(name, columns, findings=(PackFinding("note", text, f"{name} of another tool"),), compared=False)
    text = f"{name}: missing in {side}, so it could not be compared"
    finding = PackFinding("error", text, f"missing {name}", ("mode",))  # in evaluation mode there are no micro-steps
    return Check(name, columns, findings=(finding,), compared=False)


def rank_findings(name: str, bench: Pack, cmp: Pack) -> list[PackFinding]:
    """Return what is missing of a capture rank by rank, where the two jobs have the same number of ranks."""
    found: list[PackFinding] = []
    for side, pack, other in ((BENCH, bench, cmp), (CMP, cmp, bench)):
        lost = [
            r for r, content in other.ranks.items() if content.has(name) and not (r in pack.ranks and pack.ranks[r].has(name))
        ]
        if lost and pack.world_size == other.world_size:
            missing = f"{numbered('rank', lost)} missing in {side}"
            found.append(PackFinding("error", f"{name}: {missing}", f"missing {name} ranks"))
    return found
