"""The numbers of a run over its steps: series → (steps, values), built from frames as they come, in bounded memory.

Every rank has a matrix [columns, series]. A column is one collected step; when there are more than `capacity`, neighbouring
columns are joined two by two and each keeps the worse of the two numbers (a NaN, then the larger magnitude), so that
nothing that stood out is lost. Rules do not read from here: they keep their own small memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from trainprobe.monitor.frames import F64, I64, Bools, Frame, Series, SeriesTable, as_slice

CAPACITY = 4096
_PART = 256  # columns


class History:
    """The series of one rank. selected: which series are kept (all by default)."""

    def __init__(self, capacity: int = CAPACITY, selected: Callable[[Series], bool] | None = None) -> None:
        self.capacity = max(4, capacity - capacity % 2)
        self.every = 1  # how many collected steps a column joins
        self.series: list[Series] = []
        self.last_step: int | None = None
        self.highest_step: int | None = None
        self._selected = selected
        self._row_of = np.zeros(0, dtype=np.int64)  # series number of the table → row, -1 not selected
        self._table: SeriesTable | None = None
        self._last: tuple[I64, slice | I64, slice | I64] | None = None  # `at` of the last frame, and what `_rows` said of it
        self._values: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self._present: Bools = np.zeros((0, 0), dtype=bool)
        self._steps: I64 = np.zeros(0, dtype=np.int64)
        self._columns = 0
        self._in_column = 0

    def add(self, frame: Frame) -> None:
        """Append one step."""
        places, rows = self._rows(frame)
        column = self._next_column(frame.step)
        new = frame.values[places].astype(np.float32)
        if self._in_column > 1:
            new = np.where(self._present[column, rows], _worse(self._values[column, rows], new), new)
        self._values[column, rows] = new
        self._present[column, rows] = True
        self.last_step = frame.step
        self.highest_step = frame.step if self.highest_step is None else max(self.highest_step, frame.step)

    def get(self, series: Series) -> tuple[I64, F64]:
        """Return (steps [n], values [n]) of a series; empty for one that was never seen."""
        if series not in self.series:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        row = self.series.index(series)
        there = self._present[: self._columns, row]
        return self.steps[there], self._values[: self._columns, row][there].astype(np.float64)

    def by_step(self, series: Series) -> tuple[I64, F64]:
        """Return what `get` does, ascending: of a step that was recorded twice, as the run went back to it, the later value."""
        steps, values = self.get(series)
        unique, last = np.unique(steps[::-1], return_index=True)
        return unique, values[::-1][last]

    @property
    def steps(self) -> I64:
        """The first step of each column, [columns]."""
        return self._steps[: self._columns]

    def matrix(self, rows: Sequence[int] | I64) -> tuple[npt.NDArray[np.float32], Bools]:
        """Return (values, present), both [rows, columns], of series given by their places in `series`."""
        values, present = np.empty((len(rows), self._columns), np.float32), np.empty((len(rows), self._columns), bool)
        for part, got, there in self.parts(rows):
            values[:, part], present[:, part] = got, there
        return values, present

    def parts(self, rows: Sequence[int] | I64) -> Iterator[tuple[slice, npt.NDArray[np.float32], Bools]]:
        """Yield (columns, values, present) of some columns after the other, so many as are turned in one go: see `matrix`."""
        for start in range(0, self._columns, _PART):
            part = slice(start, min(start + _PART, self._columns))
            yield part, self._values[part].take(rows, axis=1).T, self._present[part].take(rows, axis=1).T

    def _rows(self, frame: Frame) -> tuple[slice | I64, slice | I64]:
        """Return the places in `frame.at` that are kept, and the row of each; computed once for steps with the same layout."""
        if self._last is not None and self._last[0] is frame.at and self._table is frame.table:
            return self._last[1:]
        rows = self._number(frame)
        places = np.flatnonzero(rows >= 0)
        self._last = frame.at, as_slice(places), as_slice(rows[places])
        return self._last[1:]

    def _number(self, frame: Frame) -> I64:
        if self._table is not frame.table:
            self._table, self._row_of = frame.table, np.zeros(0, dtype=np.int64)
        known = {series: i for i, series in enumerate(self.series)} if self._row_of.size == 0 else None
        more: list[int] = []
        for series in frame.table.series[self._row_of.size :]:
            row = known.get(series) if known else None
            if row is None and (self._selected is None or self._selected(series)):
                row = len(self.series)
                self.series.append(series)
            more.append(-1 if row is None else row)
        if more:
            self._row_of = np.concatenate([self._row_of, np.array(more, dtype=np.int64)])
        self._make_room(len(self.series), self._values.shape[0])
        return self._row_of[frame.at]

    def _make_room(self, rows: int, columns: int) -> None:
        have = self._values.shape
        if rows <= have[1] and columns <= have[0]:
            return
        shape = (max(columns, have[0]), max(rows, have[1] * 3 // 2 if rows > have[1] else have[1]))
        if shape[1] == have[1]:  # the memory grows where it lies: there are no two copies of a long run
            self._values.resize(shape, refcheck=False)
            self._present.resize(shape, refcheck=False)
        else:
            values, present = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
            values[: have[0], : have[1]], present[: have[0], : have[1]] = self._values, self._present
            self._values, self._present = values, present
        self._steps = np.concatenate([self._steps, np.zeros(shape[0] - have[0], dtype=np.int64)])

    def _next_column(self, step: int) -> int:
        if self._columns and self._in_column < self.every:
            self._in_column += 1
            return self._columns - 1
        if self._columns == self.capacity:
            self._halve()
        if self._columns == self._values.shape[0]:
            self._make_room(self._values.shape[1], min(self.capacity, max(64, self._columns * 5 // 4)))
        self._columns += 1
        self._in_column = 1
        self._steps[self._columns - 1] = step
        return self._columns - 1

    def _halve(self) -> None:
        n = self._columns
        a, b = self._values[0:n:2], self._values[1:n:2]
        pa, pb = self._present[0:n:2], self._present[1:n:2]
        self._values[: n // 2] = np.where(pa & pb, _worse(a, b), np.where(pa, a, b))
        self._present[: n // 2] = pa | pb
        self._present[n // 2 :] = False
        self._steps[: n // 2] = self._steps[0:n:2]
        self._columns, self.every = n // 2, 2 * self.every


def _worse(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(a) | (np.abs(a) >= np.abs(b)), a, b)
