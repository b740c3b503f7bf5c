"""The page of a comparison: `dump-compare --html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.page.write import PackedRank, ShownPair, pack_rank, write_page
from trainprobe.dump_compare.pairing import RankPair
from trainprobe.dump_compare.results import Compared, DumpsVerdict


def page_of_rank(pair: RankPair, judged: Sequence[Judged], sides: tuple[Side, Side]) -> PackedRank:
    """Return one rank and step as the page holds it."""
    return pack_rank(pair.step, pair.rank, judged, sides)


def write_comparison(ranks: Sequence[Compared], verdict: DumpsVerdict, paths: tuple[Path, Path], target: Path) -> Path:
    """Write the page of ranks that `page_of_rank` was worked out of. Raises OutputError."""
    first = None
    if verdict.first is not None:
        rank, judged = verdict.first
        place = next(i for i, one in enumerate(rank.calls) if one is judged)
        first = next(i for i, other in enumerate(ranks) if other is rank), place
    sentence = verdict.sentence[:1].upper() + verdict.sentence[1:]
    title = f"{paths[0].name or paths[0]} and {paths[1].name or paths[1]}"
    shown = ShownPair(title, sentence, verdict.details, verdict.code, [str(path) for path in paths], first)
    return write_page(shown, [rank.made["page"] for rank in ranks], target)
