"""A comparison of two dumps as a table in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trainprobe.comparison.files import write_json
from trainprobe.comparison.terminal import plain_table, show_verdict
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.result_schema import ComparedCall, ComparedValue, DumpComparison
from trainprobe.dump_compare.results import Compared, DumpsVerdict
from trainprobe.engine.core.step_data import entry_name

_STYLE = {"identical": "green", "rounding": "cyan", "carried": "", "suspicious": "yellow", "bug": "bold red"}


def show(ranks: Sequence[Compared], verdict: DumpsVerdict, console: Console, most: int = 20) -> None:
    """Print the verdict and, from the first place where the runs part on, the calls that are apart."""
    show_verdict(verdict, console, most)
    if verdict.first is None:
        return
    rank, first = verdict.first
    differing = [
        judged
        for judged in rank.calls
        if judged.pair.place >= first.pair.place and judged.outcome not in ("identical", "rounding")
    ]
    heads = ("call", "result", "apart", "given", "own rounding", "told by", "verdict")
    table = plain_table(heads, ("apart", "given", "own rounding"), ("call",))
    for judged in differing[:most]:
        table.add_row(*_cells(judged, rank.framework))
    console.print(table)
    if len(differing) > most:
        console.print(Text(f"… and {len(differing) - most} more calls of this rank (--json lists all)"))


def _cells(judged: Judged, framework: str) -> tuple[str | Text, ...]:
    worst = judged.worst
    verdict = Text(judged.outcome, style=_STYLE.get(judged.outcome, "yellow"))
    name = entry_name(judged.call, framework)
    if worst is None:
        return name, "", "", "", "", judged.argument and "argument", verdict
    apart = "?" if worst.interval.low == 0 < worst.interval.high else f"{worst.interval.low:.1e}"
    given = "?" if math.isinf(judged.given) else f"{judged.given:.1e}"
    own = f"{judged.rounding(worst):.1e}{' measured' if worst.floor else ''}"
    return name, worst.slot, apart, given, own, worst.interval.evidence, verdict


def write_calls(ranks: Sequence[Compared], verdict: DumpsVerdict, path: Path) -> None:
    """Write all calls (see result_schema). Infinities are null. Raises OutputError."""
    first = verdict.first
    document = DumpComparison(
        code=verdict.code,
        verdict=verdict.sentence,
        details=list(verdict.details),
        first=None if first is None else _described(*first),
        calls=[_described(rank, judged) for rank in ranks for judged in rank.calls],
    )
    write_json(document, path)


def _described(rank: Compared, judged: Judged) -> ComparedCall:
    pair = judged.pair
    return ComparedCall(
        step=rank.at.step,
        rank=rank.at.rank,
        a=None if pair.a is None else entry_name(pair.a, rank.framework),
        b=None if pair.b is None else entry_name(pair.b, rank.framework_b),
        paired_by=rank.by_structure.get(pair.a.name, "name") if pair.a is not None and pair.b is not None else "",
        verdict=judged.outcome,
        argument=judged.argument,
        given=judged.given,
        own_rounding=judged.own,
        values=[
            ComparedValue(
                slot=value.slot,
                result=value.result,
                low=value.interval.low,
                high=value.interval.high,
                evidence=value.interval.evidence,
                note=value.interval.note,
                formats=value.formats,
                cancelled=value.cancelled,
                floor=value.floor or None,
                from_truth=value.from_truth,
            )
            for value in judged.values
        ],
    )
