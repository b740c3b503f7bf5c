"""One rank and step of a dump, as the comparison asks it: a value's statistics, fingerprints and elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Value
from trainprobe.engine.core.step_data import numbers_of_rows
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.storage.dumps import not_read, open_tensors, read
from trainprobe.errors import FormatError, UnsafeFile

STATISTICS: tuple[str, ...] = ("norm", "max", "min", "mean")
_BITS = ("checksum", "crc32")
_PART = frozenset(["shard", "placements"])  # what a value has beside it of which the dump stores a part
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """What dumps say of some values, as columns: statistic, or kind of fingerprint → (numbers, where there is one)."""

    statistics: Mapping[str, tuple[npt.NDArray[np.float64], Bools]]
    bits: Mapping[str, tuple[npt.NDArray[np.uint64], Bools]]

    def and_made(self, made: Sequence[Mapping[str, float]]) -> Columns:
        """Return these columns with further values behind them. made: the statistics of each; they have no fingerprints."""
        nothing = np.zeros(len(made), np.uint64), np.zeros(len(made), bool)
        added = {name: column_of([each.get(name) for each in made]) for name in STATISTICS}
        return Columns(
            {name: (np.append(x, added[name][0]), np.append(y, added[name][1])) for name, (x, y) in self.statistics.items()},
            {kind: (np.append(x, nothing[0]), np.append(y, nothing[1])) for kind, (x, y) in self.bits.items()},
        )


class Side:
    """What the dump in a rank's folder says of its values. unread: why entries, files or stored values could not be read.

    has_copies: whether this is several ranks, of which some may hold copies of a value (see `disagreement`). adds_up: whether
    statistics are sums of those of several ranks, which round in float64.
    """

    has_copies = False
    adds_up = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step_data = read(folder)
        self._store = open_tensors(folder)
        self.unread = not_read(self.step_data)

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics of a value by name, without those that are absent."""
        return _of_row(self._by_row[0], value.row)

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return the fingerprints of a value's bits by kind: "checksum" (64 bits), "crc32"."""
        return _of_row(self._by_row[1], value.row)

    @cached_property
    def _by_row(self) -> tuple[list[tuple[str, list[Any]]], list[tuple[str, list[Any]]]]:
        columns = numbers_of_rows(self.step_data)
        statistics = [(name, column) for name, column in columns.items() if name not in _BITS]
        return statistics, [(name, columns[name]) for name in _BITS if name in columns]

    def columns(self, values: Sequence[Value]) -> Columns:
        """Return what the dump says of these values."""
        rows = np.fromiter(map(attrgetter("row"), values), np.int64, len(values))
        whole = self._columns
        return Columns(
            {name: _at_rows(column, rows) for name, column in whole.statistics.items()},
            {name: _at_rows(column, rows) for name, column in whole.bits.items()},
        )

    @cached_property
    def _columns(self) -> Columns:
        """What is said of all rows."""
        step_data, count = self.step_data, len(self.step_data.partials)
        nothing = np.zeros(count), np.zeros(count, bool)
        statistics = dict.fromkeys(STATISTICS, nothing)
        for name in STATISTICS:
            if name in step_data.finished:
                statistics[name] = step_data.finished[name], ~step_data.absent.get(name, nothing[1])
        bits: dict[str, tuple[npt.NDArray[np.uint64], Bools]] = {}
        if step_data.checksums is not None:
            bits["checksum"] = step_data.checksums, ~step_data.absent.get("checksum", nothing[1])
        if step_data.crc32:
            bits["crc32"] = np.zeros(count, np.uint64), np.zeros(count, bool)
            rows = np.fromiter(step_data.crc32, np.int64, len(step_data.crc32))
            bits["crc32"][0][rows] = [int(text, 16) % (1 << 64) for text in step_data.crc32.values()]
            bits["crc32"][1][rows] = True
        return Columns(statistics, bits)

    @property
    def measured(self) -> bool:
        """Return whether the dump has a statistic of any value."""
        return any(there.any() for _, there in self._columns.statistics.values())

    def counted(self, value: Value) -> tuple[float | None, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None]:
        """Return how many elements of a value are zero and the edges and counts of its histogram, each None if unknown."""
        row, zeros = value.row, self.step_data.finished.get("zero")
        known = zeros is not None and 0 <= row < len(zeros) and not self.step_data.absent["zero"][row]
        return float(zeros[row]) if zeros is not None and known else None, (self.step_data.histograms or {}).get(row)

    def norm(self, value: Value) -> float:
        """Return the l2 norm of a value from its statistics or else its elements; NaN where the dump has neither."""
        norms, there = self._norms
        return norms[value.row] if value.row >= 0 and there[value.row] else norm_of(self.array(value))

    @cached_property
    def _norms(self) -> tuple[memoryview, memoryview]:
        """The column of norms, whose elements are taken out one by one a third faster so."""
        norms, there = self._columns.statistics["norm"]
        return norms.data, there.data

    def array(self, value: Value) -> npt.NDArray[Any] | None:
        """Return the elements of a value where the dump stores all of them. Raises UnsafeFile where a name leads elsewhere."""
        return self.held(value, tuple(value.shape))

    def held(self, value: Value, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """Return what `array` does, of this shape: of a DTensor a rank stores what it holds, and the value has the whole's."""
        if value.tensor is None:
            return None
        try:
            array = self._store.array(value.tensor)
        except UnsafeFile:
            raise
        except FormatError as error:
            self._add_unread(str(error))
            return None
        if np.shape(array) == shape:
            return array
        if np.size(array) == math.prod(shape):
            return np.reshape(array, shape)  # MindSpore's `reshape` gives the same tensor, which was stored in its first shape
        if shape == tuple(value.shape) and _PART.isdisjoint(value.extra or ()):
            self._add_unread(f"{value.tensor} has the shape {[*np.shape(array)]} in its file and {[*shape]} in dump.json")
        return None

    def contradicts(self, value: Value) -> bool:
        """Note that a value's file does not hold what the dump has the fingerprint of; return whether it is so."""
        array, told = self.array(value), self.bits(value).get("checksum")
        if array is not None and value.dtype.endswith("bfloat16") and array.dtype == np.float32:
            array = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
        elif array is not None and not value.dtype.endswith(array.dtype.name):
            return False  # widened to another format: its bits are not those that were stored
        if array is None or told is None or fingerprint(np.asarray(array)) == told:
            return False
        self._add_unread(f"{value.tensor} is not what was recorded: its elements contradict their fingerprint in dump.json")
        return True

    def _add_unread(self, why: str) -> None:
        if why not in self.unread:
            self.unread.append(why)

    def place_of(self, value: Value, at: Sequence[int]) -> str:
        """Return where an element of a value is that is made of several: "", as this is one value."""
        return ""

    def disagreement(self, value: Value) -> Any:
        """Return how far copies of a value are apart that several ranks hold: None, as this is one rank."""
        return None


def _at_rows(column: tuple[npt.NDArray[Any], Bools], rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], Bools]:
    """Return the numbers in these rows, and where there is one; of row -1, a value that could not be reduced, there is none."""
    numbers, there = column
    known = rows >= 0
    return (numbers[rows], there[rows] & known) if len(numbers) else (np.zeros(len(rows), numbers.dtype), known)


def norm_of(array: npt.NDArray[Any] | None) -> float:
    """Return the l2 norm of an array; NaN where there is none."""
    return math.nan if array is None else float(np.linalg.norm(np.asarray(array, np.float64)))


def hexadecimal(kind: str, number: int) -> str:
    """Return a fingerprint as dumps write it, with its leading zeros."""
    return f"{number:08x}" if kind == "crc32" else f"{number:016x}"


def column_of(numbers: Sequence[float | None]) -> tuple[npt.NDArray[np.float64], Bools]:
    """Return numbers as a column, and where there is one."""
    return np.array([math.nan if x is None else x for x in numbers]), np.array([x is not None for x in numbers], bool)


def gathered(side: Side, values: Sequence[Value]) -> Columns:
    """Return what a side says of values that it is asked for one by one."""
    statistics = [side.numbers(value) for value in values]
    bits = [side.bits(value) for value in values]
    kinds = {kind for each in bits for kind in each if kind in _BITS}
    return Columns(
        {name: column_of([each.get(name) for each in statistics]) for name in STATISTICS},
        {
            kind: (np.array([each.get(kind, 0) for each in bits], np.uint64), np.array([kind in each for each in bits], bool))
            for kind in kinds
        },
    )


def _of_row(columns: Sequence[tuple[str, list[Any]]], row: int) -> dict[str, Any]:
    """Return the numbers of a row by name, without those that are absent."""
    return {} if row < 0 else {name: number for name, column in columns if (number := column[row]) is not None}
