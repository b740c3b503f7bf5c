"""The run log as frames: the same frames as those of the collected steps that were written, made of whole columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from trainprobe.engine.core.addresses import Address
from trainprobe.engine.core.records import Phase
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.run_log.read import Bound, read_tables, steps_of
from trainprobe.engine.storage.run_log.schema import kind_of_address
from trainprobe.monitor.frames import (
    F64,
    I64,
    SHORT,
    Bools,
    Frame,
    SeriesTable,
    dimensions_of,
    health_of,
    with_scalars,
)

Codes = npt.NDArray[np.int32]

_WORDS = ("phase", "kind", "name", "slot")
_COLUMNS = (
    *_WORDS,
    "call",
    "dtype",
    "shape",
    "count",
    "nan",
    "posinf",
    "neginf",
    "zero",
    "min",
    "max",
    "mean",
    "norm",
    "checksum",
    "value",
    "numbers",
    "edges",
    "detail",
)
_STATISTICS = ("norm", "absmax", "mean", "zero_share")
_NO_VALUE = ("scalar", "feature", "step", "layout")


class RunLog:
    """Follows the run log of a rank: each time it is asked, it yields the frames that were written since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = SeriesTable()
        self._last: Any = None

    def frames(self, bounds: Sequence[Bound] = ()) -> Iterator[Frame]:
        """Yield the frames of the steps that were not yielded yet; bounds: as for `read_tables`."""
        new = [] if self._last is None else [("time", ">", self._last)]
        for table in read_tables(self._folder, _COLUMNS, [*bounds, *new]):
            self._last = table["time"][-1].as_py()
            yield from _Segment(table, self._known).frames()


class _Segment:
    """The columns of one table as arrays; rows are in the order of steps and of execution."""

    def __init__(self, table: pa.Table, known: SeriesTable) -> None:
        self._table = table
        self._known = known
        self._codes = {name: _codes(table[name]) for name in _WORDS}
        self._steps = steps_of(table)
        self._words: dict[str, list[str]] = {name: table[name].chunk(0).dictionary.to_pylist() for name in _WORDS}
        self._value = _numbers(table["value"], np.nan)
        self._kind = {name: self._codes["kind"] == _index(self._words["kind"], name) for name in _NO_VALUE}
        self._has_address = ~np.any([rows for kind, rows in self._kind.items() if kind != "feature"], axis=0)
        counted = table["nan"].is_valid().to_numpy() & (_numbers(table["count"], 0) > 0)
        self._is_value = counted & self._has_address & ~self._kind["feature"]
        self._addresses = self._number_addresses()
        self._health = health_of(*(_numbers(table[name], 0) for name in ("neginf", "posinf", "nan")))
        self._statistics = _statistics(table)
        self._taken = table["checksum"].is_valid().to_numpy()

    def frames(self) -> Iterator[Frame]:
        """Yield a frame a step."""
        steps = _numbers(self._table["step"], 0)
        for rows in self._steps:
            yield self._frame(int(steps[rows.start]), rows)

    def _number_addresses(self) -> I64:
        """Return the number of the address of each row that has one, [rows]; 0 elsewhere."""
        key = _numbers(self._table["call"], 0).astype(np.int64)
        for name in _WORDS:
            key = key * len(self._words[name]) + self._codes[name]
        addresses = np.zeros(self._table.num_rows, np.int64)
        known: dict[bytes, I64] = {}  # the keys of a step → its addresses: most steps have those of the one before
        for whole in self._steps:
            rows = self._of(whole, self._has_address)
            keys = key[rows]
            text = keys.tobytes()
            if text not in known:
                known[text] = self._number(rows, keys)
            addresses[rows] = known[text]
        return addresses

    def _number(self, rows: I64, keys: I64) -> I64:
        """Return the numbers of the addresses of some rows, [rows]; those that are new are numbered in the order of the rows."""
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)
        at = rows[first[order]]
        words = ([self._words[name][code] for code in self._codes[name][at].tolist()] for name in _WORDS)
        calls, shapes, dtypes = (self._table[name].take(at).to_pylist() for name in ("call", "shape", "dtype"))
        numbers = np.zeros(len(at), np.int64)
        for i, (phase, kind, name, slot), call, shape, dtype in zip(order, zip(*words), calls, shapes, dtypes, strict=True):
            address = Address(cast(Phase, phase), kind_of_address(kind), name, call or 0, slot)
            numbers[i] = self._known.address(address, dimensions_of(orjson.loads(shape)) if shape else 0, dtype or "")
        return numbers[inverse.reshape(-1)]

    def _frame(self, step: int, rows: slice) -> Frame:
        known, here = self._known, self._of(rows, self._is_value)
        taken = self._taken[here]
        names = (*_STATISTICS, "checksum") if taken.any() else _STATISTICS
        at = known.layout(self._addresses[here], names)
        values = self._statistics[here][:, : len(names)].reshape(-1)
        if taken.any() and not taken.all():
            there = np.ones((len(here), len(names)), dtype=bool)
            there[:, -1] = taken
            at, values = at[there.reshape(-1)], values[there.reshape(-1)]
        features = self._of(rows, self._kind["feature"])
        if features.size:
            more, numbers = self._features(features)
            at, values = np.concatenate([at, more]), np.concatenate([values, numbers])
        about = orjson.loads(self._table["detail"][int(self._of(rows, self._kind["step"])[0])].as_py())
        flat = (at, values, self._addresses[here], self._health[here])
        return with_scalars(step, read_place(about["place"]), known, flat, self._scalars(rows), about["complete"])

    def _of(self, rows: slice, mask: Bools) -> I64:
        return np.flatnonzero(mask[rows]) + rows.start

    def _scalars(self, rows: slice) -> dict[str, float]:
        names = self._words["name"]
        return {
            names[self._codes["name"][row]]: float(self._value[row]) for row in self._of(rows, self._kind["scalar"]).tolist()
        }

    def _features(self, rows: I64) -> tuple[I64, F64]:
        known, at, values = self._known, list[int](), list[float]()
        for row in rows.tolist():
            if self._table["edges"][row].is_valid:
                continue
            address = known.addresses[self._addresses[row]]
            several = self._table["numbers"][row].as_py()
            for i, number in enumerate(several or ()):
                at.append(known.series_at(known.address(address._replace(slot=f"{address.slot}.{i}")), "value"))
                values.append(number)
            if several is None:
                at.append(known.series_at(int(self._addresses[row]), "value"))
                values.append(float(self._value[row]))
        return np.array(at, np.int64), np.array(values, np.float64)


def _codes(column: pa.ChunkedArray) -> Codes:
    return column.chunk(0).indices.fill_null(-1).to_numpy(zero_copy_only=False)


def _index(words: list[str], word: str) -> int:
    return words.index(word) if word in words else -2


def _numbers(column: pa.ChunkedArray, absent: float) -> npt.NDArray[Any]:
    return column.fill_null(absent).to_numpy()


def _statistics(table: pa.Table) -> F64:
    """Return the numbers of each row, [rows, statistics], and the fingerprint last."""
    found = np.empty((table.num_rows, len(_STATISTICS) + 1))
    for i, name in enumerate(_STATISTICS):
        if name == "absmax":
            np.maximum(*(np.abs(_numbers(table[end], np.nan)) for end in ("max", "min")), out=found[:, i])
        elif name == "zero_share":
            np.divide(_numbers(table["zero"], 0), np.maximum(_numbers(table["count"], 1), 1), out=found[:, i])
        else:
            found[:, i] = _numbers(table[name], np.nan)
    found[:, -1] = _numbers(table["checksum"], 0) & np.uint64(SHORT)
    return found
