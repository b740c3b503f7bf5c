"""Leaves of a dump, read: tensors become Values with a row of numbers, everything else what it was in the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Opaque, Value
from trainprobe.engine.stats.partials import PARTIALS, STATISTICS
from trainprobe.engine.storage.dumps.entry_text import KEYS
from trainprobe.engine.storage.dumps.numbers_text import read_number

DEPTH = 400
_PLAIN = {"int": int, "float": read_number, "bool": bool, "str": str}
_ABOUT = frozenset({"type", "dtype", "shape", "requires_grad", "data_name", "md5", "checksum", "note"})
_DESCRIBED = _ABOUT | {"histogram", "quantiles", *KEYS.values()}


class Leaves:
    """Collects the values of one dump as its entries are read. wanted: the statistics that its header tells of."""

    def __init__(self, wanted: tuple[str, ...] = ()) -> None:
        self.values: list[Value] = []
        self.histograms: dict[int, Any] = {}
        self.quantiles: dict[int, Any] = {}
        self._wanted = tuple(name for name in wanted if name in STATISTICS)
        self._keys = {name: KEYS.get(name, name) for name in self._wanted or KEYS}
        self._rows: list[list[float | None]] = []
        self._checksums: dict[int, int] = {}
        self._md5: dict[int, str] = {}

    def tree(self, thing: Any, depth: int = 0) -> Any:
        """Return a tree of values, scalars, opaque leaves, lists and dicts. Raises ValueError or TypeError where it is none."""
        if depth > DEPTH:
            raise ValueError(f"it is nested deeper than {DEPTH}")
        if isinstance(thing, list):
            return [self.tree(item, depth + 1) for item in thing]
        if not isinstance(thing, dict):
            return thing
        kind = thing.get("type")
        if not isinstance(kind, str):
            return {str(key): self.tree(item, depth + 1) for key, item in thing.items()}
        if isinstance(thing.get("dtype"), str) and isinstance(thing.get("shape"), list):
            return self._value(kind, thing)
        if kind in _PLAIN and "value" in thing:
            return _PLAIN[kind](thing["value"])
        rest = {key: item for key, item in thing.items() if key not in {"type", "value"}}
        return Opaque(kind, thing.get("value"), rest or None)

    def _value(self, kind: str, leaf: dict[str, Any]) -> Value:
        numbers: list[float | None] = [None if leaf.get(key) is None else read_number(leaf[key]) for key in self._keys.values()]
        md5, checksum = leaf.get("md5"), leaf.get("checksum")
        if isinstance(md5, (int, float)) and not any(x is not None for x in numbers):
            number, md5 = float(md5), None  # in xor mode a scalar's value stands in place of its bits
            numbers = [number for _ in numbers]
        row = -1
        if any(x is not None for x in numbers) or md5 is not None or checksum is not None:
            row = len(self._rows)
            self._rows.append(numbers)
        if isinstance(checksum, str):
            self._checksums[row] = int(checksum, 16)
        elif isinstance(md5, str):
            int(md5, 16)  # raises where it is no number
            self._md5[row] = md5
        if "histogram" in leaf:
            told = leaf["histogram"]
            self.histograms[row] = (np.array(told["edges"], float), np.array(told["counts"], float))
        if "quantiles" in leaf:
            self.quantiles[row] = np.array([read_number(x) for x in leaf["quantiles"]])
        keys = self._keys.values()
        extra = {key: item for key, item in leaf.items() if key not in _DESCRIBED and key not in keys}
        value = Value(
            row,
            leaf["dtype"],
            tuple(int(n) for n in leaf["shape"]),
            type=kind,
            requires_grad=leaf.get("requires_grad"),
            note=leaf.get("note"),
            tensor=leaf.get("data_name"),
            extra=extra or None,
        )
        self.values.append(value)
        return value

    def columns(
        self,
    ) -> tuple[
        dict[str, npt.NDArray[np.float64]],
        dict[str, npt.NDArray[np.bool_]],
        npt.NDArray[np.uint64] | None,
        dict[int, str] | None,
        npt.NDArray[np.float64],
    ]:
        """Return finished numbers, where they are absent, checksums, CRC-32 texts and (unknown) partials of all rows."""
        rows = len(self._rows)
        finished: dict[str, npt.NDArray[np.float64]] = {}
        absent: dict[str, npt.NDArray[np.bool_]] = {}
        for i, name in enumerate(self._keys):
            gone = np.array([row[i] is None for row in self._rows], bool)
            if rows and gone.all() and (not self._wanted):
                continue
            absent[name] = gone
            finished[name] = np.array([np.nan if row[i] is None else row[i] for row in self._rows], float)
        checksums = None
        if self._checksums:
            checksums = np.zeros(rows, np.uint64)
            absent["checksum"] = np.ones(rows, bool)
            for row, checksum in self._checksums.items():
                checksums[row] = checksum
                absent["checksum"][row] = False
        return finished, absent, checksums, self._md5 or None, np.full((rows, len(PARTIALS)), np.nan)
