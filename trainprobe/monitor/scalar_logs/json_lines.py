"""JSON lines with a number that counts steps, as many trainers write: `{"step": 10, "loss": 2.5}`.

A line without a step, such as settings or the result of an evaluation, is no step and is passed over.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, LOG_FILE
from trainprobe.engine.storage.left_out import DAMAGED, leave_out, tell
from trainprobe.engine.storage.safe_files import lines_of, open_to_read
from trainprobe.monitor.scalar_logs.rows import numbers_of

WHAT = "files of JSON lines with a `step`"
_LOOKED_AT = 50  # lines in which one with a step must be
_USUAL = 3  # a scalar that had a number in so many lines has one


def find(path: Path) -> list[list[Path]]:
    """Return each such file under a folder, or the one that is named; not what this package writes."""
    files = [path] if path.is_file() and path.suffix == ".jsonl" else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    others = (file for file in files if file.is_file() and file.name not in (LOG_FILE, FINDINGS_FILE))
    return [[file] for file in others if counts_steps(file)]


def counts_steps(file: Path) -> bool:
    """Tell whether the first lines of a file hold a step, and are not of this package's own record."""
    try:
        with open_to_read(file) as lines:
            return any(_counts(line) for line in islice(lines_of(lines, file), _LOOKED_AT))
    except DAMAGED:
        return False


def _counts(line: bytes) -> bool:
    try:
        return any(numbers_of(_row(line)))
    except DAMAGED:  # what a program printed into its log
        return False


def read(files: list[Path]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of each line; one that is no JSON is left out and told, and a scalar that turns null."""
    seen: Counter[str] = Counter()  # scalars, and how often they were numbers; below 0 once they were null
    with open_to_read(files[0]) as lines:
        for number, line in enumerate(lines_of(lines, files[0]), 1):
            try:
                row = _row(line)
            except DAMAGED as error:
                leave_out(f"{files[0]}, line {number}, is left out: it is no JSON ({error!s:.200})")
            else:
                for name in [name for name, value in row.items() if value is None]:
                    if seen[name] >= _USUAL:
                        tell(f"{files[0]}, line {number}: {name!r} turns null, which some programs write for NaN: not judged")
                    seen[name] = -sys.maxsize
                seen.update(row.keys())
                yield from numbers_of(row)


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line) if line.strip() else {}  # it may hold NaN, which orjson refuses
    return row if isinstance(row, dict) and "place" not in row else {}
