"""CSV with one row a step and one column a scalar, as Lightning's CSVLogger, Keras and Ultralytics write it.

A number belongs to the step of its row. Lightning writes several rows of one step, each with some of the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from trainprobe.engine.storage.left_out import leave_out
from trainprobe.engine.storage.safe_files import text_lines
from trainprobe.errors import FormatError
from trainprobe.monitor.scalar_logs.rows import STEPS, numbers_of, step_of

WHAT = "CSV files with a column `step`"


def find(path: Path) -> list[list[Path]]:
    """Return each such file under a folder, or the one that is named; what a monitor has written is read before."""
    files = [path] if path.is_file() and path.suffix == ".csv" else sorted(path.rglob("*.csv")) if path.is_dir() else []
    return [[file] for file in files if file.is_file() and _counts_steps(file)]


def _counts_steps(file: Path) -> bool:
    try:
        columns = {name.strip() for name in next(csv.reader(text_lines(file)), ())}
    except (csv.Error, FormatError):
        return False
    return len(columns) > 1 and not columns.isdisjoint(STEPS)


def read(files: list[Path]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of each row; one that tells no step is left out and told."""
    rows = csv.DictReader(text_lines(files[0]))
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            leave_out(f"{files[0]}, line {rows.line_num}: {error}")
            continue
        if row is None:
            return
        named = {name.strip(): value for name, value in row.items() if name is not None}
        if step_of(named) is None:
            leave_out(f"{files[0]}, line {rows.line_num}: the row has no number in any of the columns {', '.join(STEPS)}")
            continue
        yield from numbers_of(named)
