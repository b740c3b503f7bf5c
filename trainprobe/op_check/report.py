"""The result of op-check: a sentence, a table of operators, CSV and JSON."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainprobe.comparison.files import write_csv, write_json
from trainprobe.comparison.terminal import plain_table, show_verdict
from trainprobe.op_check.conclusion import Conclusion, beyond, outcomes
from trainprobe.op_check.dump import Row
from trainprobe.op_check.judge import OUTCOMES
from trainprobe.op_check.measure import NEAR
from trainprobe.op_check.result_schema import Result

_STYLE = {
    "bug": "bold red",
    "suspicious": "yellow",
    "mode": "magenta",
    "not checked": "yellow",
    "rounding": "cyan",
    "exact": "green",
}
COLUMNS = tuple(field.name for field in fields(Result))


def show(rows: Sequence[Row], conclusion: Conclusion, console: Console, most: int = 12) -> None:
    """Print the sentence, the remarks and one line an operator."""
    show_verdict(conclusion, console, most)
    if rows:
        console.print(_table(rows))


def _table(rows: Sequence[Row]) -> Table:
    by_name: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_name[row.name, row.checked.direction].append(row)
    heads = ("operator", "direction", "calls", "judged against", "worst, in bounds", "verdicts")
    table = plain_table(heads, ("calls", "worst, in bounds"), ("operator",))
    for (name, direction), group in sorted(by_name.items(), key=lambda item: -max(map(_rank, item[1]))):
        counts = outcomes(group)
        verdicts = Text(", ").join(
            Text(f"{counts[outcome]} {outcome}", style=_STYLE.get(outcome, ""))
            for outcome in reversed(OUTCOMES)
            if counts[outcome]
        )
        sources = ", ".join(sorted({row.checked.source for row in group} - {""}))
        worst = max((row.worst.worst for row in group if row.worst.outcome != "not checked"), default=0.0)
        beside = f"{beyond(worst)} of {NEAR:g}" if worst else ""
        table.add_row(name, direction, str(counts.total()), sources, beside, verdicts)
    return table


def _rank(row: Row) -> int:
    return OUTCOMES.index(row.worst.outcome)


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one record for each result of each call."""
    records: list[dict[str, Any]] = []
    for row in rows:
        for i, judgement in enumerate(row.checked.judgements):
            values = (
                *(row.step, row.rank, row.entry, row.name, row.module, row.checked.direction, i),
                *(judgement.outcome, judgement.reason, _finite(judgement.worst)),
                *(None if judgement.at is None else [*judgement.at], _finite(judgement.got), _finite(judgement.want)),
                *(judgement.share, _finite(judgement.gain), judgement.flips, _finite(judgement.one_sided), judgement.count),
                *(row.checked.source, row.checked.note, row.equal),
            )
            records.append(dict(zip(COLUMNS, values, strict=True)))
    return records


def _finite(number: float | None) -> float | str | None:
    """JSON has no infinities: these are text, as in dumps."""
    return number if number is None or math.isfinite(number) else str(number)


def write_document(rows: Sequence[Row], conclusion: Conclusion, path: Path, standard: Any) -> None:
    """Write all results as JSON. standard: the results by a standard that was asked for. Raises OutputError."""
    document = {
        "code": conclusion.code,
        "verdict": conclusion.sentence,
        "details": list(conclusion.details),
        "results": lines(rows),
        "standard": standard,
    }
    write_json(document, path)


def write_lines(rows: Sequence[Row], path: Path) -> None:
    """Write one line for each result as CSV. Raises OutputError."""
    write_csv(COLUMNS, (record.values() for record in lines(rows)), path)
