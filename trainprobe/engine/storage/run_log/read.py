"""Reads the run log of a rank: whole, by column, or by a range of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from trainprobe.engine.core.records import Feature
from trainprobe.engine.core.step_data import StoredStepData
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.layout import find_segments
from trainprobe.engine.storage.dumps.record_log import read_structure
from trainprobe.engine.storage.run_log.replicas import SameAs, expanded, read_segment, same_as, schema_of
from trainprobe.engine.storage.run_log.schema import OF_STATISTIC
from trainprobe.engine.storage.run_log.segments import live_table
from trainprobe.errors import FormatError

ALWAYS = ("time", "position", "step")
Bound = tuple[str, str, Any]
_FROM = {**OF_STATISTIC, "inf": "posinf", "absmax": "max"}  # statistic → a column that is null where it is unknown


def read_tables(folder: Path, columns: Sequence[str] | None = None, bounds: Sequence[Bound] = ()) -> Iterator[pa.Table]:
    """Yield the segments of a rank's run log, oldest first, and then its live stream, a table each.

    columns: which are read; None for all. bounds: such as ("step", ">=", 100), with one of > >= < <=; all must hold. Rows are
    in the order in which the steps were written, and of a step in the order of execution. Raises FormatError for a file that is
    no segment.
    """
    selected = None if columns is None else [*dict.fromkeys((*ALWAYS, *columns))]
    yield from _read_ahead(partial(_rows_of_segment, selected=selected, bounds=bounds), find_segments(folder))
    live = live_table(folder)
    if live is not None:
        live = live if selected is None else live.select(selected)
        live = live.filter(pq.filters_to_expression([*bounds])) if bounds else live
        if live.num_rows:
            yield _in_order(live)
    pa.default_memory_pool().release_unused()


def _read_ahead(read: Callable[[Path], pa.Table], segments: Iterable[Path]) -> Iterator[pa.Table]:
    """Yield the rows of each segment that has any, in order; the next one is read while the caller works on this one."""
    with ThreadPoolExecutor(1) as reader:
        tables = (reader.submit(lambda segment: _in_order(read(segment)), segment) for segment in segments)
        coming = deque(islice(tables, 1))
        while coming:
            coming.extend(islice(tables, 1))
            table = coming.popleft().result()
            if table.num_rows:
                yield table


def _rows_of_segment(segment: Path, selected: Sequence[str] | None, bounds: Sequence[Bound]) -> pa.Table:
    to = _refers_to(segment)
    if to is None:
        return read_segment(segment, selected, filters=[*bounds] or None)
    named = None if selected is None else [*dict.fromkeys((*selected, *(name for name, _, _ in bounds)))]
    table = expanded(segment, to, named)
    table = table.filter(pq.filters_to_expression([*bounds])) if bounds else table
    return table if selected is None else table.select(selected)


def _refers_to(segment: Path) -> SameAs | None:
    try:
        return same_as(schema_of(segment))
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{segment} is no segment of a run log: {error}") from None


def _in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([("time", "ascending"), ("position", "ascending")]).unify_dictionaries().combine_chunks()


def steps_of(table: pa.Table) -> list[slice]:
    """Return the rows of each step of a table that `read_tables` returned."""
    times = table["time"].cast(pa.int64()).to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def read_steps(folder: Path) -> Iterator[StoredStepData]:
    """Yield the steps of a rank's run log as collected steps with finished numbers, in the order in which they were written."""
    layouts: dict[str, Any] = {}
    for table in read_tables(folder):
        for rows in steps_of(table):
            yield _step_data(table.slice(rows.start, rows.stop - rows.start), layouts)


def _step_data(table: pa.Table, layouts: dict[str, Any]) -> StoredStepData:
    rest: dict[str, list[dict[str, Any]]] = {"feature": [], "scalar": [], "step": [], "layout": []}
    values: list[dict[str, Any]] = []
    for row in table.to_pylist():
        rest.get(row["kind"], values).append(row)
    layouts.update({row["name"]: orjson.loads(row["detail"]) for row in rest["layout"]})
    about = orjson.loads(rest["step"][0]["detail"])
    structure = layouts[about["layout"]]
    calls, shown = read_structure(structure, [orjson.loads(row["shape"]) for row in values])
    of_row = {shown[number].row: row for number, row in zip(structure["places"], values, strict=True) if shown[number].row >= 0}
    rows = [of_row.get(i, {}) for i in range(max(of_row, default=-1) + 1)]
    numbers = {name: np.array([_or_nan(row.get(column)) for row in rows]) for name, column in OF_STATISTIC.items()}
    numbers["inf"] = np.array([_or_nan(row.get("posinf")) + _or_nan(row.get("neginf")) for row in rows])
    numbers["absmax"] = np.maximum(np.abs(numbers["max"]), np.abs(numbers["min"]))
    sums = [row.get("checksum") for row in rows]
    return StoredStepData(
        step=table["step"][0].as_py(),
        place=read_place(about["place"]),
        framework=about["framework"],
        level=about["level"],
        task=about["task"],
        calls=calls,
        values=shown,
        partials=np.full((len(rows), len(PARTIALS)), np.nan),
        checksums=np.array([x or 0 for x in sums], np.uint64) if any(x is not None for x in sums) else None,
        statistics=tuple(about["wanted"]),
        crc32={i: row["crc32"] for i, row in enumerate(rows) if row.get("crc32")} or None,
        histograms={i: (np.array(r["edges"]), np.array(r["numbers"])) for i, r in enumerate(rows) if r.get("edges")} or None,
        quantiles={i: np.array(r["quantiles"]) for i, r in enumerate(rows) if r.get("quantiles")} or None,
        scalars={row["name"]: row["value"] for row in rest["scalar"]},
        stacks=structure["stacks"],
        notes=about.get("notes", ()),
        programs=tuple(about["programs"]),
        complete=about["complete"],
        features=[_feature(row) for row in rest["feature"]],
        batches=about.get("batches", ()),
        finished={name: numbers[name] for name in about["wanted"]},
        absent={
            **{name: np.array([_is_absent(row, name) for row in rows], bool) for name in about["wanted"]},
            "checksum": np.array([x is None for x in sums]),
        },
    )


def _is_absent(row: dict[str, Any], statistic: str) -> bool:
    return not row.get("count") or row.get(_FROM[statistic]) is None


def _or_nan(x: float | None) -> float:
    return np.nan if x is None else x


def _feature(row: dict[str, Any]) -> Feature:
    numbers = [row["value"]] if row["numbers"] is None else row["numbers"]
    edges = None if row["edges"] is None else np.array(row["edges"], float)
    return Feature(row["name"], row["slot"], row["call"], row["micro"], np.array(numbers, float), edges)
