"""A run's series as the SQLite file that the trend page of mindstudio-probe opens in TensorBoard.

A metric is what was recorded of a module or parameter (`parameter_grad`, `module_output`), a target its name. As that page
expects of its own writer, numbers beyond ±1e9 are written as ±1e9 and infinities as ±(1e9 + 1); NaN is an empty cell.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainprobe.engine.storage.safe_files import page_database
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import Frame, Series

# our statistic → the page's; what is one number has it in the column of the mean
STATISTICS = {"norm": "norm", "max": "max", "min": "min", "mean": "mean", "zero": "zeros", "nan": "nans", "value": "mean"}
COLUMNS = ("norm", "max", "min", "mean", "zeros", "nans")
LIMIT = 1e9
_TABLES = f"""
CREATE TABLE monitoring_metrics (metric_id INTEGER PRIMARY KEY, metric_name TEXT UNIQUE);
CREATE TABLE monitoring_targets (target_id INTEGER PRIMARY KEY, target_name TEXT, vpp_stage INTEGER NOT NULL,
  micro_step INTEGER NOT NULL DEFAULT 0, UNIQUE (target_name, vpp_stage, micro_step));
CREATE TABLE trend_data (rank INTEGER, step INTEGER, target_id INTEGER, metric_id INTEGER,
  {", ".join(f"{name} REAL" for name in COLUMNS)}, PRIMARY KEY (rank, step, target_id, metric_id)) WITHOUT ROWID;
CREATE TABLE monitoring_tags (tag_id INTEGER PRIMARY KEY, tag_name TEXT, category TEXT, metric_id INTEGER);
CREATE TABLE tag_target_mapping (tag_id INTEGER, target_id INTEGER);
"""


class _TrendNumbers:
    """Names in order, numbered from 1."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self.of.setdefault(name, len(self.of) + 1)


class TrendWriter:
    """Takes the frames of a run and writes their numbers. Raises sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._metrics, self._targets = _TrendNumbers(), _TrendNumbers()
        self._known: dict[Series, tuple[int, int, int] | None] = {}
        self._columns: dict[int, set[int]] = defaultdict(set)
        self.ranks: set[int] = set()
        self.steps: set[int] = set()
        database.executescript(_TABLES)

    def add(self, frame: Frame) -> None:
        """Write one step of one rank."""
        rank = frame.place.rank
        rows = ((rank, frame.step, *row) for row in self._rows(frame))
        marks = ", ".join("?" * (4 + len(COLUMNS)))
        self._database.executemany(f"INSERT OR REPLACE INTO trend_data VALUES ({marks})", rows)
        self.ranks.add(rank)
        self.steps.add(frame.step)

    def _rows(self, frame: Frame) -> Iterator[tuple[float | None, ...]]:
        """Yield target, metric and the number of each column."""
        found: dict[tuple[int, int], list[float | None]] = {}
        known = frame.table.series
        for number, value in zip(frame.at.tolist(), frame.values.tolist(), strict=True):
            place = self._place(known[number])
            if place is not None:
                found.setdefault(place[:2], [None] * len(COLUMNS))[place[2]] = limited(value)
        yield from ((*key, *row) for key, row in found.items())

    def _place(self, series: Series) -> tuple[int, int, int] | None:
        """Return the target, the metric and the column of a series; None for one that the page has no place for."""
        if series not in self._known:
            address, statistic = series.address, STATISTICS.get(series.statistic)
            if statistic is None or address.phase == "recompute":
                self._known[series] = None
            else:
                metric, target = names_of(series)
                column = COLUMNS.index(statistic)
                place = self._targets.number(target), self._metrics.number(metric), column
                self._columns[place[1]].add(column)
                self._known[series] = place
        return self._known[series]

    def finish(self) -> None:
        """Write the names and what there is of each metric."""
        self._database.executemany(
            "INSERT INTO monitoring_metrics VALUES (?, ?)", ((i, name) for name, i in self._metrics.of.items())
        )
        targets = ((i, name) for name, i in self._targets.of.items())
        self._database.executemany("INSERT INTO monitoring_targets VALUES (?, ?, 0, 0)", targets)
        columns = "".join(f', "{name}" TEXT' for name in self._metrics.of)
        self._database.execute(f"CREATE TABLE global_stats (max_rank INTEGER, min_step INTEGER, max_step INTEGER{columns})")
        there = [",".join(COLUMNS[i] for i in sorted(self._columns[number])) for number in self._metrics.of.values()]
        marks = ", ".join("?" * (3 + len(there)))
        ends = max(self.ranks), min(self.steps), max(self.steps)
        self._database.execute(f"INSERT INTO global_stats VALUES ({marks})", (*ends, *there))


def names_of(series: Series) -> tuple[str, str]:
    """Return the metric, an identifier, and the target of a series: ("parameter_grad", "layers.0.weight")."""
    address = series.address
    if address.kind == "scalar":
        return _identifier(address.name), "scalar"
    first, _, rest = address.slot.partition(".")
    phase = "" if address.phase in ("forward", "backward", "step", "optimizer") else f"{address.phase}_"
    call = f"[{address.call}]" if address.call else ""
    return _identifier(f"{phase}{address.kind}_{first}"), f"{address.name or '(model)'}{call}{f'.{rest}' if rest else ''}"


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name, flags=re.ASCII)
    return text if text[:1].isalpha() else f"m_{text}"


def limited(value: float) -> float | None:
    """Return a number as the page expects it: clipped to ±1e9, infinities one beyond, None for NaN."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return math.copysign(LIMIT + 1, value)
    return max(-LIMIT, min(LIMIT, value))


def write_trend_db(frames: Iterable[Frame], path: Path) -> tuple[int, int]:
    """Write the file, whole or not at all; return how many ranks and steps it holds.

    Raises FormatError where there are no frames, OutputError where the file cannot be written.
    """
    with page_database(path, ".trend.db", "--trend") as database:
        writer = TrendWriter(database)
        for frame in frames:
            writer.add(frame)
        if not writer.steps:
            raise FormatError("the run has no recorded step to export")
        writer.finish()
    return len(writer.ranks), len(writer.steps)
