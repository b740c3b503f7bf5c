"""Leaves of a dump, read: tensors become Values with a row of numbers, everything else what it was in the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Opaque, Value
from trainprobe.engine.stats.partials import PARTIALS, STATISTICS
from trainprobe.engine.storage.dumps.entry_text import KEYS, read_number

DEPTH = 400
_FORMS = 4096  # forms and shapes that are remembered
_PLAIN = {"int": int, "float": read_number, "bool": bool, "str": str}
_ABOUT = frozenset({"type", "dtype", "shape", "requires_grad", "data_name", "md5", "checksum", "note"})
_DESCRIBED = _ABOUT | {"histogram", "quantiles", *KEYS.values()}


class NoNumber(ValueError):  # noqa: N818  (named for what it says)
    """A statistic of a value that is not a number. row: of the value."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class _Form:
    """The leaves that have one sequence of keys: almost all leaves of a dump do, so what follows from keys is found once."""

    def __init__(self, keys: tuple[str, ...], statistics: Sequence[str]) -> None:
        self.is_tensor = {"type", "dtype", "shape"} <= set(keys)
        self.numbers = _getter([key if key in keys else None for key in statistics])
        about = ("type", "dtype", "shape", "requires_grad", "note", "data_name", "md5", "checksum")
        self.about = _getter([key if key in keys else None for key in about])
        self.extra = [key for key in keys if key not in _DESCRIBED and key not in statistics]
        self.is_special = "histogram" in keys or "quantiles" in keys


def _getter(keys: Sequence[str | None]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return what reads these keys of a leaf, None for a key that is None."""
    if len(keys) > 1 and None not in keys:
        return itemgetter(*keys)
    present = [key for key in keys if key is not None]
    if len(present) < 2:
        return lambda leaf: tuple(None if key is None else leaf[key] for key in keys)
    get, places = itemgetter(*present), [key is not None for key in keys]
    if all(places[: len(present)]):
        rest = (None,) * (len(keys) - len(present))
        return lambda leaf: (*get(leaf), *rest)
    order = itemgetter(*(present.index(key) if key is not None else len(present) for key in keys))
    return lambda leaf: order((*get(leaf), None))


class _Shapes(dict[tuple[Any, ...], tuple[int, ...]]):
    """Shapes as they were read → as tuples of whole numbers, of which each is kept once."""

    def __missing__(self, shape: tuple[Any, ...]) -> tuple[int, ...]:
        found = tuple(int(n) for n in shape)
        if len(self) < _FORMS:
            self[shape] = found
        return found


class Leaves:
    """Collects the values of one dump as its entries are read. statistics: those that its header names."""

    def __init__(self, statistics: tuple[str, ...] = ()) -> None:
        self.histograms: dict[int, Any] = {}
        self.quantiles: dict[int, Any] = {}
        self._statistics = tuple(name for name in statistics if name in STATISTICS)
        self._keys = {name: KEYS.get(name, name) for name in self._statistics or KEYS}
        self._rows: list[tuple[Any, ...]] = []  # as they stand in the file
        self._checksums: dict[int, int] = {}
        self._md5: dict[int, str] = {}
        self._forms: dict[tuple[str, ...], _Form] = {}
        self._shapes = _Shapes()
        self._texts: dict[str, str] = {}
        self._nothing = (None,) * len(self._keys)

    def tree(self, thing: Any, depth: int = 0) -> Any:
        """Return a tree of values, scalars, opaque leaves, lists and dicts. Raises ValueError or TypeError where it is none."""
        if isinstance(thing, dict):
            form = self._forms.get(tuple(thing)) or self._new_form(thing)
            return self._object(form, thing, depth)
        if isinstance(thing, list):
            if depth > DEPTH:
                raise ValueError(f"it is nested deeper than {DEPTH}")
            return [self.tree(item, depth + 1) for item in thing]
        return thing

    def _object(self, form: _Form, thing: dict[str, Any], depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError(f"it is nested deeper than {DEPTH}")
        kind = thing.get("type")
        if not isinstance(kind, str):
            return {str(key): self.tree(item, depth + 1) for key, item in thing.items()}
        if form.is_tensor and isinstance(thing["dtype"], str) and isinstance(thing["shape"], list):
            return self._value(form, thing)
        if kind in _PLAIN and "value" in thing:
            return _PLAIN[kind](thing["value"])
        rest = {key: item for key, item in thing.items() if key not in {"type", "value"}}
        return Opaque(kind, thing.get("value"), rest or None)

    def _new_form(self, leaf: dict[str, Any]) -> _Form:
        keys = tuple(leaf)
        form = _Form(keys, list(self._keys.values()))
        if len(self._forms) < _FORMS:
            self._forms[keys] = form
        return form

    def _value(self, form: _Form, leaf: dict[str, Any]) -> Value:
        numbers = form.numbers(leaf)
        kind, dtype, shape, requires_grad, note, tensor, md5, checksum = form.about(leaf)
        for key, text in (("note", note), ("data_name", tensor)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{key} is {text!r}, which is no text")
        bare = numbers == self._nothing
        if bare and isinstance(md5, (int, float)):
            number, md5, bare = float(md5), None, False  # in xor mode a scalar's value stands in place of its bits
            numbers = (number,) * len(numbers)
        row = -1
        if not bare or md5 is not None or checksum is not None:
            row = len(self._rows)
            self._rows.append(numbers)
        if isinstance(checksum, str):
            self._checksums[row] = int(checksum, 16)
            if not 0 <= self._checksums[row] < 1 << 64:
                raise ValueError(f"checksum {checksum!r} has more than 64 bits")
        if isinstance(md5, str) and md5 != checksum:
            int(md5, 16)  # raises where it is no number
            self._md5[row] = md5
        if form.is_special:
            self._read_special(leaf, row)
        return Value(
            row,
            self._texts.setdefault(dtype, dtype),
            self._shapes[tuple(shape)],
            type=self._texts.setdefault(kind, kind),
            requires_grad=requires_grad,
            note=note,
            tensor=tensor,
            extra={key: leaf[key] for key in form.extra} if form.extra else None,
        )

    def _read_special(self, leaf: dict[str, Any], row: int) -> None:
        if "histogram" in leaf:
            histogram = leaf["histogram"]
            self.histograms[row] = (np.array(histogram["edges"], float), np.array(histogram["counts"], float))
        if "quantiles" in leaf:
            self.quantiles[row] = np.array([read_number(x) for x in leaf["quantiles"]])

    def columns(
        self,
    ) -> tuple[
        dict[str, npt.NDArray[np.float64]],
        dict[str, npt.NDArray[np.bool_]],
        npt.NDArray[np.uint64] | None,
        dict[int, str] | None,
        npt.NDArray[np.float64],
    ]:
        """Return finished numbers, where they are absent, checksums, CRC-32 texts and (unknown) partials of all rows.

        Raises NoNumber where a statistic is none.
        """
        rows = len(self._rows)
        table, gone = self._table()
        finished: dict[str, npt.NDArray[np.float64]] = {}
        absent: dict[str, npt.NDArray[np.bool_]] = {}
        for i, name in enumerate(self._keys):
            if rows and gone[:, i].all() and (not self._statistics):
                continue
            absent[name] = gone[:, i].copy()
            finished[name] = table[:, i].copy()
        checksums = None
        if self._checksums:
            checksums, absent["checksum"] = np.zeros(rows, np.uint64), np.ones(rows, bool)
            for row, checksum in self._checksums.items():
                checksums[row] = checksum
                absent["checksum"][row] = False
        return finished, absent, checksums, self._md5 or None, np.broadcast_to(np.nan, (rows, len(PARTIALS)))

    def _table(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return the numbers of all rows, and where there are none. Raises NoNumber."""
        shape = len(self._rows), len(self._keys)
        flat = list(chain.from_iterable(self._rows))
        if {*map(type, flat)} <= {float}:
            numbers, gone = np.array(flat, float), np.zeros(shape, bool)
        else:
            gone = np.array([x is None for x in flat], bool)
            numbers = np.array([self._number(x, i) for i, x in enumerate(flat)], float)
        return numbers.reshape(shape), gone.reshape(shape)

    def _number(self, x: Any, place: int) -> float:
        try:
            return read_number(x)
        except (TypeError, ValueError, OverflowError) as error:
            raise NoNumber(place // len(self._keys), str(error)) from None
