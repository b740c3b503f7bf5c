"""`accuracy_checking_result_*.csv` and `accuracy_checking_details_*.csv` of a judged dump."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from trainprobe.comparison.files import writing
from trainprobe.engine.storage.sheet_cells import write_rows
from trainprobe.op_check.classic.columns import (
    BENCH,
    BLANK,
    DETAILS_COLUMNS,
    DEVICE,
    MESSAGE,
    METRICS,
    NAME,
    RELATIVE,
    RESULT_COLUMNS,
    SHAPE,
    STATUS,
    number,
)
from trainprobe.op_check.dump import Row
from trainprobe.op_check.judge import OUTCOMES, Outcome
from trainprobe.op_check.standards.limits import assigned
from trainprobe.op_check.standards.measured import Output, without_metrics
from trainprobe.op_check.standards.report import by_call
from trainprobe.op_check.standards.verdicts import ERROR, PASS, SKIP, WARNING, first_verdict

Record = dict[str, str]
_DIGITS = 14


def stamped() -> str:
    """Return the time as it stands in the names of these files."""
    return time.strftime("%Y%m%d%H%M%S")


def places(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return the (step, rank) that there are rows of, in order."""
    return sorted({(row.step, row.rank) for row in rows})


def folder_of(folder: Path, step: int, rank: int, several: bool) -> Path:
    """Return where the files of a step and rank lie: in a folder of their own where there are several."""
    return folder / f"step{step}" / f"rank{rank}" if several else folder


def write_details(rows: Sequence[Row], folder: Path, stamp: str, digits: int = _DIGITS, go_on: bool = False) -> list[Path]:
    """Write both files of each step and rank; return those with the details. go_on: add to files that are there.

    Raises OutputError.
    """
    each = places(rows)
    written: list[Path] = []
    for step, rank in each:
        here = [row for row in rows if (row.step, row.rank) == (step, rank)]
        calls = details(here, digits)
        into = folder_of(folder, step, rank, len(each) > 1)
        path = into / f"accuracy_checking_details_{stamp}.csv"
        _write(path, DETAILS_COLUMNS, (r for records in calls.values() for r in records), go_on)
        results = (summary(call, records) for call, records in calls.items())
        _write(into / f"accuracy_checking_result_{stamp}.csv", RESULT_COLUMNS, results, go_on)
        written.append(path)
    return written


def details(rows: Sequence[Row], digits: int = _DIGITS) -> dict[str, list[Record]]:
    """Return call → its rows in the details file, forward before backward; rows are of one step and rank."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for (_, _, call, direction), row in by_call(rows).items():
        found[call][direction] = row
    return {
        call: [record for direction in ("forward", "backward") for record in _of_call(call, found[call].get(direction), digits)]
        for call in found
    }


def _of_call(call: str, row: Row | None, digits: int) -> list[Record]:
    if row is None:
        return []
    named = f"{call}.{row.checked.direction}.output."
    if not row.measured:
        blank = dict.fromkeys(DETAILS_COLUMNS, BLANK)
        return [{**blank, NAME: f"{named}0", STATUS: without_metrics(row.worst).status, MESSAGE: _ours(row)}]
    return [_of_output(f"{named}{output.number}", row, output, digits) for output in row.measured]


def _of_output(name: str, row: Row, output: Output, digits: int) -> Record:
    """Return the row of one result. Its message begins with our verdict: the classic one passes whatever is below 0.001."""
    metrics = output.metrics
    measured = metrics is not None and output.elements > 0
    verdict = (
        first_verdict(output.dtype, metrics, output.elements) if metrics and _judged(output) else without_metrics(row.worst)
    )
    skipped = RELATIVE if assigned(row.name, output.dtype) != "absolute" else ""
    numbers = {
        column: number(getattr(metrics, field), digits) if measured and column != skipped else BLANK
        for column, field in METRICS.items()
    }
    shape = "({})".format(", ".join(map(str, output.shape)) + ("," if len(output.shape) == 1 else ""))
    formats = {BENCH: str(output.bench), DEVICE: str(output.dtype), SHAPE: shape}
    return {NAME: name, **formats, **numbers, STATUS: verdict.status, MESSAGE: f"{_ours(row)}; {verdict.reason}".rstrip("; ")}


def _ours(row: Row) -> str:
    return f"op-check: {row.worst.outcome}{f', {row.worst.reason}' if row.worst.reason else ''}"


def summary(call: str, records: Sequence[Record]) -> Record:
    """Return the row of a call in the result file."""
    statuses = {
        direction: overall([r[STATUS] for r in records if f".{direction}.output." in r[NAME]])
        for direction in ("forward", "backward")
    }
    gravest = max((r[MESSAGE] for r in records), key=_gravity, default="")
    told = [gravest, *(r[MESSAGE] for r in records if r[STATUS] in (SKIP, ERROR))]
    return dict(zip(RESULT_COLUMNS, (call, *statuses.values(), "\n".join(dict.fromkeys(told))), strict=True))


def _gravity(message: str) -> int:
    """Return how grave our verdict is, with which each message begins."""
    said = re.match(rf"op-check: ({'|'.join(OUTCOMES)})", message)
    return OUTCOMES.index(cast("Outcome", said[1])) if said else -1


def overall(statuses: Sequence[str]) -> str:
    """Return the status of a direction: the gravest of its results; a SKIP among them is no pass; blank without results."""
    return next((status for status in (ERROR, WARNING, SKIP, PASS) if status in statuses), BLANK)


def failed(rows: Iterable[Row]) -> list[Row]:
    """Return the calls that are errors by the classic first verdict, or bugs by ours."""
    return [row for row in rows if row.worst.outcome == "bug" or any(_status(o) == ERROR for o in row.measured)]


def _status(output: Output) -> str:
    return first_verdict(output.dtype, output.metrics, output.elements).status if output.metrics and _judged(output) else ""


def _judged(output: Output) -> bool:
    return output.metrics is not None and output.metrics.unequal is not None


def write_table(path: Path, columns: Sequence[str], records: Iterable[Mapping[str, str]]) -> None:
    """Write a table as these tools do: UTF-8 with a byte order mark. Raises OutputError."""
    _write(path, columns, records, False)


def _write(path: Path, columns: Sequence[str], records: Iterable[Mapping[str, str]], go_on: bool) -> None:
    go_on = go_on and path.exists()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if go_on else "w", newline="", encoding="utf-8" if go_on else "utf-8-sig") as file:
            write_rows(file, [] if go_on else [columns])
            write_rows(file, ([record[column] for column in columns] for record in records))


def dtype_of(text: str) -> torch.dtype | None:
    """Return the format that a cell names, `torch.float32`; None for all else."""
    found = getattr(torch, text.strip().removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
