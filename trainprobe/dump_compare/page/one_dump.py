"""`trainprobe show DUMP`: the page of one dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.page.write import PackedRank, ShownPair, pack_rank, write_page
from trainprobe.dump_compare.pairing import CallPair, ranks_of
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.step_counts import shortfall


def show(
    dump: Annotated[Path, typer.Argument(help="a dump's folder, a step or a rank of it; any tool's", metavar="DUMP")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page; by default dump.html in the dump's folder")
    ] = None,
) -> int:
    """Write one self-contained HTML page of a dump: its calls as a tree, with all their numbers.

    Exit code 0, or 3 where steps or parts of it are missing.
    """
    found = ranks_of(dump)
    folders = [(step, rank, folder) for step, ranks in sorted(found.items()) for rank, folder in sorted(ranks.items())]
    packed: list[PackedRank] = []
    unread = list[str]()
    measured = False
    for step, rank, folder in folders:
        side = Side(folder)
        unread += side.unread if side.step_data.complete else [f"step {step} of rank {rank} did not end", *side.unread]
        measured = measured or side.measured
        packed.append(_pack(step, rank, side))
    calls, bad = sum(sum(each.counts.values()) for each in packed), sum(each.counts.get("nonfinite", 0) for each in packed)
    steps, ranks = len(found), len({rank for _, rank, _ in folders})
    sentence = f"{counted(calls, 'call')} in {counted(steps, 'step')} of {counted(ranks, 'rank')}"
    sentence += f", {bad:,} of them hold NaN or infinities" if bad else ", all numbers are finite" if measured else ""
    details = [f"{counted(len(unread), 'part')} of the dump could not be read, such as: {unread[0]}"] if unread else []
    details += filter(None, [shortfall(dump, sink="dump")])
    sentence = "; ".join([*details, sentence])
    target = output or (dump if dump.is_dir() else dump.parent) / "dump.html"
    page = write_page(ShownPair(str(dump), sentence, [], 0, [str(dump)]), packed, target, "-o")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", markup=False)
    for line in details:
        console.print(line, markup=False)
    return 3 if details else 0


def _pack(step: int, rank: int, side: Side) -> PackedRank:
    judged = [Judged(CallPair(i, call, None)) for i, call in enumerate(side.step_data.calls)]
    return pack_rank(step, rank, judged, (side, None))
