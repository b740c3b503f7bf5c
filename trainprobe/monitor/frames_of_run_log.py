"""The run log as frames: the same frames as those of the collected steps that were written, made of whole columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
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
    SCALED,
    SHORT,
    Bools,
    Frame,
    SeriesTable,
    as_slice,
    health_of,
    with_scalars,
)

Codes = npt.NDArray[np.int32]

_WORDS = ("phase", "kind", "name", "slot")
_COLUMNS = (
    *_WORDS,
    "call",
    "micro",
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
_LAYOUTS = 64  # so many are remembered beyond a segment
_NO_VALUE = ("scalar", "feature", "step", "layout")


class RunLog:
    """Follows the run log of a rank: each time it is asked, it yields the frames that were written since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = _Known(SeriesTable())
        self._last: Any = None

    def frames(self, bounds: Sequence[Bound] = ()) -> Iterator[Frame]:
        """Yield the frames of the steps that were not yielded yet; bounds: as for `read_tables`."""
        new = [] if self._last is None else [("time", ">", self._last)]
        for table in read_tables(self._folder, _COLUMNS, [*bounds, *new]):
            self._last = table["time"][-1].as_py()
            yield from _Segment(table, self._known).frames()


@dataclass(slots=True)
class _StepLayout:
    """What the steps of one structure have in common: rows, counted from the first row of a step, and their series.

    values, features, scalars: the rows of each sort, values as a slice where they lie in one piece. step: the row of the step
    itself. names: of the scalars. featured: the addresses of the features. at, addresses: of the values, each with so many
    statistics. there: which of these numbers there are, where some values have no fingerprint. like: a frame of such a step,
    where no features come with it.
    """

    values: slice | I64
    features: I64
    scalars: I64
    step: int
    names: list[str]
    featured: list[int]
    at: I64
    addresses: I64
    statistics: int
    there: Bools | None
    like: Frame | None = None


@dataclass(slots=True)
class _Known:
    """What is known of the segments before. words: those that the keys of rows are made of, for each column.

    layouts: of steps, by the keys of their rows. addresses: the number of each, by a row's key without what else it tells.
    """

    table: SeriesTable
    words: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    layouts: dict[bytes, _StepLayout] = field(default_factory=dict[bytes, _StepLayout])
    addresses: dict[int, int] = field(default_factory=dict[int, int])


class _Segment:
    """The columns of one table as arrays; rows are in the order of steps and of execution."""

    def __init__(self, table: pa.Table, known: _Known) -> None:
        self._table = table
        self._known = known.table
        self._codes = {name: _codes(table[name]) for name in _WORDS}
        self._words: dict[str, list[str]] = {name: table[name].chunk(0).dictionary.to_pylist() for name in _WORDS}
        self._name_scaled_gradients()
        self._value = _numbers(table["value"], np.nan)
        self._kind = {name: self._codes["kind"] == _index(self._words["kind"], name) for name in _NO_VALUE}
        self._has_address = ~np.any([rows for kind, rows in self._kind.items() if kind != "feature"], axis=0)
        counted = table["nan"].is_valid().to_numpy() & (_numbers(table["count"], 0) > 0)
        self._is_value = counted & self._has_address & ~self._kind["feature"]
        self._taken = table["checksum"].is_valid().to_numpy()
        self._health = health_of(*(_numbers(table[name], 0) for name in ("neginf", "posinf", "nan")))
        self._statistics = _statistics(table)
        self._keys = self._keys_of_rows()
        if known.words != self._words or len(known.layouts) > _LAYOUTS:
            known.words, known.layouts, known.addresses = self._words, {}, {}
        self._layouts, self._numbered = known.layouts, known.addresses

    def _name_scaled_gradients(self) -> None:
        """Tell gradients that calls showed from those that the optimizer got, where a loss scale stands between them."""
        words, codes = self._words, self._codes
        if "loss_scale" not in words["name"] or "gradient" not in words["kind"]:
            return
        grad = (codes["kind"] == _index(words["kind"], "gradient")) & (codes["slot"] == _index(words["slot"], "grad"))
        shown = grad & self._table["micro"].is_valid().to_numpy()
        if shown.any():
            words["slot"].append(SCALED)
            codes["slot"] = np.where(shown, np.int32(len(words["slot"]) - 1), codes["slot"])

    def frames(self) -> Iterator[Frame]:
        """Yield a frame a step."""
        steps, known = _numbers(self._table["step"], 0), self._layouts  # most steps have the structure of the one before
        for rows in steps_of(self._table):
            key = self._keys[rows].tobytes()
            if key not in known:
                known[key] = self._layout(rows)
            yield self._frame(int(steps[rows.start]), rows.start, known[key])

    def _keys_of_rows(self) -> I64:
        """Return a number for each row, [rows], that tells its address, whether it is a value, and whether of known bits."""
        key = _numbers(self._table["call"], 0).astype(np.int64)
        for name in _WORDS:
            key = key * (len(self._words[name]) + 1) + self._codes[name] + 1
        return key * 4 + self._is_value * 2 + self._taken

    def _layout(self, rows: slice) -> _StepLayout:
        """Return the layout of a step, and number the addresses of its rows."""
        with_address = self._of(rows, self._has_address)
        addresses = np.zeros(rows.stop - rows.start, np.int64)
        addresses[with_address] = self._addresses(with_address + rows.start)
        values, features, scalars, step = (
            self._of(rows, mask) for mask in (self._is_value, *(self._kind[name] for name in ("feature", "scalar", "step")))
        )
        taken = self._taken[values + rows.start]
        names = (*_STATISTICS, "checksum") if taken.any() else _STATISTICS
        at, there = self._known.layout(addresses[values], names), None
        if taken.any() and not taken.all():
            there = np.ones((len(values), len(names)), dtype=bool)
            there[:, -1] = taken
            there = there.reshape(-1)
            at = at[there]
        scalar_names = [self._words["name"][code] for code in self._codes["name"][scalars + rows.start].tolist()]
        featured = addresses[features].tolist()
        step_row, count = int(step[0]), len(names)
        return _StepLayout(
            as_slice(values), features, scalars, step_row, scalar_names, featured, at, addresses[values], count, there
        )

    def _addresses(self, rows: I64) -> list[int]:
        """Return the number of the address of each of some rows; what is met first has the lower number."""
        keys = (self._keys[rows] // 4).tolist()
        new = [key not in self._numbered for key in keys]
        self._numbered.update(zip(compress(keys, new), self._number(rows[new]), strict=True))
        return [self._numbered[key] for key in keys]

    def _number(self, rows: I64) -> list[int]:
        words = ([self._words[name][code] for code in self._codes[name][rows].tolist()] for name in _WORDS)
        others = (self._table[name].take(rows).to_pylist() for name in ("call", "shape", "dtype", "count"))
        return [
            self._known.address(
                Address(cast(Phase, phase), kind_of_address(kind), name, call or 0, slot),
                _sizes(shape),
                dtype or "",
                count or 0,
            )
            for phase, kind, name, slot, call, shape, dtype, count in zip(*words, *others, strict=True)
        ]

    def _frame(self, step: int, start: int, layout: _StepLayout) -> Frame:
        lie = layout.values
        here = slice(lie.start + start, lie.stop + start) if isinstance(lie, slice) else lie + start
        at, values = layout.at, self._statistics[here, : layout.statistics].reshape(-1)
        if layout.there is not None:
            values = values[layout.there]
        if layout.features.size:
            more, numbers = self._features(layout.features + start, layout.featured)
            at, values = np.concatenate([at, more]), np.concatenate([values, numbers])
        about = orjson.loads(self._table["detail"][start + layout.step].as_py())
        scalars = dict(zip(layout.names, self._value[layout.scalars + start].tolist(), strict=True))
        flat = (at, values, layout.addresses, self._health[here])
        frame = with_scalars(step, read_place(about["place"]), self._known, flat, scalars, about["complete"], layout.like)
        if not layout.features.size:
            layout.like = frame
        return frame

    def _of(self, rows: slice, mask: Bools) -> I64:
        """Return where a mask holds among the rows of a step, from its first row on."""
        return np.flatnonzero(mask[rows])

    def _features(self, rows: I64, addresses: Sequence[int]) -> tuple[I64, F64]:
        known, at, values = self._known, list[int](), list[float]()
        for row, number_of_address in zip(rows.tolist(), addresses, strict=True):
            if self._table["edges"][row].is_valid:
                continue
            address = known.addresses[number_of_address]
            several = self._table["numbers"][row].as_py()
            for i, number in enumerate(several or ()):
                at.append(known.series_at(known.address(address._replace(slot=f"{address.slot}.{i}")), "value"))
                values.append(number)
            if several is None:
                at.append(known.series_at(number_of_address, "value"))
                values.append(float(self._value[row]))
        return np.array(at, np.int64), np.array(values, np.float64)


def _codes(column: pa.ChunkedArray) -> Codes:
    return column.chunk(0).indices.fill_null(-1).to_numpy(zero_copy_only=False)


@lru_cache(maxsize=4096)
def _sizes(shape: str | None) -> tuple[int, ...]:
    return tuple(orjson.loads(shape)) if shape else ()


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
