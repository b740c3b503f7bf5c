"""A segment holds the rows of its stream, sorted by series as Python sorts them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainprobe.engine.storage.run_log.schema import COLUMNS, SCHEMA
from trainprobe.engine.storage.run_log.segments import write_segment

KEYS = ("kind", "name", "slot", "phase", "call", "micro", "step", "position")


def rows(count: int, widest: int) -> pa.Table:
    """Rows in any order, many of one series; whole numbers up to `widest`, some null."""
    rng = np.random.default_rng(count)
    words = [None, "a", "b.2", "b.10", "é"]
    found = {name: pa.nulls(count, kind) for name, (kind, _) in COLUMNS.items()}
    for name in ("kind", "name", "slot", "phase"):
        drawn = [words[i] for i in rng.integers(0, 5, count)]
        found[name] = pa.array(drawn, pa.string()).dictionary_encode().cast(COLUMNS[name][0])
    for name in ("call", "micro", "position"):
        drawn = rng.integers(-1, min(widest, 1 << 31), count).tolist()
        found[name] = pa.array([None if i < 0 else i for i in drawn], COLUMNS[name][0])
    found["step"] = pa.array(rng.integers(0, widest, count), pa.int64())
    found["value"] = pa.array(rng.normal(size=count))
    return pa.table(list(found.values()), schema=SCHEMA)


def key(row: dict) -> tuple:
    return tuple((row[name] is not None, row[name] if row[name] is not None else 0) for name in KEYS)


@pytest.mark.parametrize("count", [1, 500])
@pytest.mark.parametrize("widest", [3, 1 << 20, 1 << 62])
def test_rows_are_sorted_by_series_and_none_is_lost(count, widest, tmp_path):
    table = rows(count, widest)
    write_segment(tmp_path / "metrics-000000.parquet", table)
    assert pq.read_table(tmp_path / "metrics-000000.parquet").to_pylist() == sorted(table.to_pylist(), key=key)
