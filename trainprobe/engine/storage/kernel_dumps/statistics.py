"""`statistic.csv` of MindSpore's dump: one line of statistics per tensor, instead of its values or in addition to them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainprobe.engine.storage.kernel_dumps.file_names import read_rows
from trainprobe.errors import FormatError

# heading, lower case and without "value" → our statistic
_STATISTICS = {
    **{"max": "max", "min": "min", "avg": "mean", "mean": "mean", "l2": "norm", "l2norm": "norm", "nan count": "nan"},
    **{"zero count": "zero", "count": "count"},
}
_INFINITE = ("negative inf count", "positive inf count")
_MOST_SLOTS = 10_000
_NEEDED = ("op type", "op name", "io", "slot")


@dataclass(frozen=True, slots=True)
class StatisticRow:
    """One line. numbers: our statistic → value, without those that the line leaves empty. md5: of the values, or ""."""

    op_type: str
    op_name: str
    task: int
    stream: int
    time: int
    io: str
    slot: int
    dtype: str
    shape: tuple[int, ...]
    numbers: Mapping[str, float]
    md5: str


def read_statistics(path: Path) -> list[StatisticRow]:
    """Read a statistic.csv. Raises FormatError with the line that cannot be read."""
    rows = read_rows(path)
    names = [name.strip().lower().removesuffix(" value") for name in rows[0]] if rows else []
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise FormatError(f"{path} is no statistic.csv of MindSpore: it has no column {missing[0]!r}")
    found: list[StatisticRow] = []
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) < len(names):
            raise FormatError(f"{path}, line {number}: {len(row)} cells, the heading has {len(names)}")
        try:
            found.append(_row(dict(zip(names, map(str.strip, row), strict=False))))
        except (ValueError, OverflowError) as error:
            raise FormatError(f"{path}, line {number} cannot be read: {error}") from None
    return found


def _row(cells: Mapping[str, str]) -> StatisticRow:
    numbers = {ours: _number(cells[name]) for name, ours in _STATISTICS.items() if cells.get(name, "null") not in {"null", ""}}
    infinite = [_number(cells[name]) for name in _INFINITE if cells.get(name, "null") not in {"null", ""}]
    if infinite:
        numbers["inf"] = sum(infinite)
    io = cells["io"].lower()
    if io not in {"input", "output"}:
        raise ValueError(f"the column IO has {io!r}, neither input nor output")
    if not 0 <= int(cells["slot"]) < _MOST_SLOTS:
        raise ValueError(f"slot {cells['slot']} is not one of {_MOST_SLOTS}")
    task, stream, time = (int(cells.get(name) or 0) for name in ("task id", "stream id", "timestamp"))
    shape = tuple(int(n) for n in re.findall(r"-?\d{1,18}", cells.get("shape", "")))[:64]
    dtype, slot, md5 = cells.get("data type", "").lower(), int(cells["slot"]), cells.get("md5", "")
    return StatisticRow(cells["op type"], cells["op name"], task, stream, time, io, slot, dtype, shape, numbers, md5)


def _number(text: str) -> float:
    number = float(text)
    return -0.0 + number if not math.isnan(number) else math.nan
