"""What a rule remembers between steps: a row of numbers for each series it watches, kept in arrays, written as JSON.

A memory is the only state a rule has. Written and read back it continues exactly where it was, so findings do not depend
on restarts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.addresses import Address
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Picker, Selection, Series, SeriesTable

T = TypeVar("T")
_DTYPES = {"float64", "int64", "bool"}


class Memory:
    """Arrays of one row a key. A key is the text of a series, or another; `numbers` holds what belongs to no series."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.numbers: dict[str, float] = {}
        self.scratch: dict[Any, Any] = {}  # what can be worked out again: never written
        self._fills: dict[str, float | int | bool] = {}  # what new rows of an array hold
        self._watched: dict[tuple[int, int], tuple[I64, Sequence[Selection], I64, I64]] = {}  # answers of `watch`
        self._rows: I64 = np.zeros(0, dtype=np.int64)  # series number → row, for one SeriesTable
        self._table: SeriesTable | None = None

    def watch(self, frame: Frame, selections: Sequence[Selection]) -> tuple[I64, I64]:
        """Return the places in `frame.at` that the selections want, [k], and their rows, [k].

        For the same `frame.at` and the same selections, as objects, they are the same arrays again, so that more can be
        remembered with them (`worked_out`).
        """
        known = self._watched.get((id(frame.at), id(selections)))
        if known is not None and known[0] is frame.at and known[1] is selections:
            return known[2:]
        chosen = tuple(selections)
        picker = self.scratch.setdefault((id(frame.table), chosen), None)
        if picker is None:
            picker = self.scratch[id(frame.table), chosen] = Picker(selections)
        places = picker.pick(frame)
        rows = self.rows(frame.table, frame.at[places])
        if len(self._watched) > 16:
            self._watched.clear()
        self._watched[id(frame.at), id(selections)] = frame.at, selections, places, rows
        return places, rows

    def worked_out(self, name: str, places: I64, work: Callable[[], T]) -> T:
        """Return what `work` makes of places that `watch` returned; it is asked once for each array of places."""
        known = self.scratch.get((name, id(places)))
        if known is None or known[0] is not places:
            if len(self.scratch) > 64:
                self.scratch.clear()
            known = self.scratch[name, id(places)] = places, work()
        return known[1]

    def rows(self, table: SeriesTable, at: I64) -> I64:
        """Return the row of each series number, [n], making rows for new ones."""
        if self._table is not table:
            self._table, self._rows = table, np.full(len(table), -1, dtype=np.int64)
        if self._rows.size < len(table):
            more = np.full(len(table) - self._rows.size, -1, dtype=np.int64)
            self._rows = np.concatenate([self._rows, more])
        for number in at[self._rows[at] < 0].tolist():
            self._rows[number] = self.row(series_text(table.series[number]))
        return self._rows[at]

    def row(self, key: str) -> int:
        """Return the row of a key, making it if it is new."""
        return self.keys.setdefault(key, len(self.keys))

    def array(self, name: str, *, width: int = 0, fill: float | int | bool = 0.0) -> npt.NDArray[Any]:
        """Return the array `name` [rows] or [rows, width], which may be written to; new rows hold `fill`."""
        have, need = self.arrays.get(name), len(self.keys)
        if have is not None and have.shape[0] >= need and name in self._fills:
            return have
        self._fills[name] = fill
        if have is None:
            kind = np.bool_ if isinstance(fill, bool) else np.int64 if isinstance(fill, int) else np.float64
            have = np.full((0, width) if width else (0,), fill, dtype=kind)
        if have.shape[0] < need:
            have = _grown(have, max(need, have.shape[0] * 3 // 2), fill)
        self.arrays[name] = have
        return have

    def learned(self, name: str, frame: Frame, places: I64, rows: I64, of: Callable[[Series], float]) -> F64:
        """Return what `of` says of each series, 0 or more, [n]: it is asked when a series is first seen, and never again.

        places, rows: as `watch` returned them; the array is not to be written to.
        """

        def learn() -> F64:
            known = self.array(name, fill=-1.0)
            new = known[rows] < 0
            for place, row in zip(places[new].tolist(), rows[new].tolist(), strict=True):
                known[row] = of(frame.table.series[frame.at[place]])
            return known[rows]

        return self.worked_out(f"learned {name}", places, learn)

    def newly(self, name: str, rows: I64, now: Bools, rearm: int = 1) -> Bools:
        """Tell where a condition begins: it holds now and has been false for the last `rearm` looks at that row."""
        if not now.any() and f"{name}.calm" not in self.arrays:  # what has never held has nothing to remember
            return now
        calm = self.array(f"{name}.calm", fill=1 << 30)
        begins = now & (calm[rows] >= rearm)
        calm[rows] = np.where(now, 0, np.minimum(calm[rows] + 1, 1 << 30))
        return begins

    def lasting(self, name: str, rows: I64, now: Bools) -> I64:
        """Return for how many looks in a row a condition has held, this one included, [n]."""
        if not now.any() and f"{name}.held" not in self.arrays:
            return np.zeros(now.size, dtype=np.int64)
        held = self.array(f"{name}.held", fill=0)
        held[rows] = np.where(now, held[rows] + 1, 0)
        return held[rows]

    def to_json(self) -> dict[str, Any]:
        """Return the memory as JSON values."""
        n = len(self.keys)
        whole = {name: _grown(a, n, self._fills[name]) if name in self._fills else a for name, a in self.arrays.items()}
        arrays = {name: _pack(a[:n]) for name, a in whole.items()}
        return {"keys": list(self.keys), "arrays": arrays, "numbers": {k: repr(v) for k, v in self.numbers.items()}}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Memory:
        """Return the memory that `to_json` wrote. Raises FormatError for anything else."""
        memory = cls()
        try:
            memory.keys = {str(key): i for i, key in enumerate(state["keys"])}
            memory.arrays = {str(name): _unpack(packed) for name, packed in state["arrays"].items()}
            memory.numbers = {str(k): float(v) for k, v in state["numbers"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"this is not the state of a rule ({error}); remove the file to begin anew") from error
        return memory


def series_text(series: Series) -> str:
    """Return a series as one text that `text_series` reads back."""
    address = series.address
    return "\t".join((address.phase, address.kind, address.name, str(address.call), address.slot, series.statistic))


def text_series(text: str) -> Series:
    """Return the series that `series_text` wrote."""
    phase, kind, name, call, slot, statistic = text.split("\t")
    return Series(Address(phase, kind, name, int(call), slot), statistic)  # pyright: ignore[reportArgumentType]


def _grown(array: npt.NDArray[Any], rows: int, fill: float | int | bool) -> npt.NDArray[Any]:
    """Return an array with at least so many rows; new ones hold `fill`."""
    missing = max(rows - array.shape[0], 0)
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, dtype=array.dtype)]) if missing else array


def _pack(array: npt.NDArray[Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def _unpack(packed: dict[str, Any]) -> npt.NDArray[Any]:
    if packed["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {packed['dtype']!r}")
    flat = np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"])
    return flat.reshape([int(n) for n in packed["shape"]]).copy()
