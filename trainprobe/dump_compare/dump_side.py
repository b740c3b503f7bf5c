"""One rank and step of a dump, as the comparison asks it: a value's statistics, fingerprints and elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Value
from trainprobe.engine.core.step_data import numbers_of_rows
from trainprobe.engine.storage.dumps import open_tensors, read
from trainprobe.errors import FormatError, UnsafeFile

_BITS = ("checksum", "crc32")


class Side:
    """What the dump in a rank's folder says of its values. unread: why stored values could not be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step_data = read(folder)
        columns = numbers_of_rows(self.step_data)
        self._statistics = [(name, column) for name, column in columns.items() if name not in _BITS]
        self._fingerprints = [(name, columns[name]) for name in _BITS if name in columns]
        self._store = open_tensors(folder)
        self.unread: list[str] = []

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics of a value by name, without those that are absent."""
        return _of_row(self._statistics, value.row)

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return the fingerprints of a value's bits by kind: "checksum" (64 bits), "crc32"."""
        return _of_row(self._fingerprints, value.row)

    def norm(self, value: Value) -> float:
        """Return the l2 norm of a value from its statistics or else its elements; NaN where the dump has neither."""
        numbers = self.numbers(value)
        if "norm" in numbers:
            return numbers["norm"]
        array = self.array(value)
        return math.nan if array is None else float(np.linalg.norm(np.asarray(array, np.float64)))

    def array(self, value: Value) -> npt.NDArray[Any] | None:
        """Return the elements of a value where the dump stores all of them. Raises UnsafeFile where a name leads elsewhere."""
        if value.tensor is None:
            return None
        try:
            array = self._store.array(value.tensor)
        except UnsafeFile:
            raise
        except FormatError as error:
            self.unread.append(str(error))
            return None
        return array if np.shape(array) == tuple(value.shape) else None

    def disagreement(self, value: Value) -> Any:
        """Return how far copies of a value are apart that several ranks hold: None, as this is one rank."""
        return None


def _of_row(columns: Sequence[tuple[str, list[Any]]], row: int) -> dict[str, Any]:
    """Return the numbers of a row by name, without those that are absent."""
    return {} if row < 0 else {name: number for name, column in columns if (number := column[row]) is not None}
