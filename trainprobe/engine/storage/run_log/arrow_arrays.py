"""Arrow arrays from NumPy arrays without a copy. `pa.array` would import pandas into the training where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]


def numbers(kind: pa.DataType, values: npt.NDArray[Any], valid: Bools | None = None) -> pa.Array:
    """Return numbers [n], whose dtype has as many bytes as the kind; valid: where they are not null."""
    return pa.Array.from_buffers(kind, len(values), [_bits(valid), pa.py_buffer(np.ascontiguousarray(values))])


def texts(n: int, known: Mapping[int, bytes]) -> pa.Array:
    """Return n texts in UTF-8; those that are not among the known ones are null."""
    if not known:
        return pa.nulls(n, pa.string())
    places = sorted(known)
    data = pa.py_buffer(b"".join(known[at] for at in places))
    valid, offsets = _offsets(n, places, [len(known[at]) for at in places])
    return pa.Array.from_buffers(pa.string(), n, [_bits(valid), offsets, data])


def lists(n: int, known: Mapping[int, Any]) -> pa.Array:
    """Return n lists of float64; those that are not among the known ones are null."""
    kind = pa.list_(pa.float64())
    if not known:
        return pa.nulls(n, kind)
    places = sorted(known)
    arrays = [np.asarray(known[at], np.float64) for at in places]
    valid, offsets = _offsets(n, places, [len(array) for array in arrays])
    return pa.Array.from_buffers(kind, n, [_bits(valid), offsets], children=[numbers(pa.float64(), np.concatenate(arrays))])


class _Numbers(dict[str | None, int]):
    """String → its number, which a new one is given when it is first asked for; written: those that the column holds."""

    def __init__(self) -> None:
        super().__init__({None: -1})
        self.written: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        text = word.encode(errors="backslashreplace").decode()
        self[word] = self.written.setdefault(text, len(self.written))
        return self[word]


class StringDictionary:
    """The distinct strings of one column, numbered as they come; null is number -1."""

    def __init__(self) -> None:
        self._numbers = _Numbers()
        self._array = texts(0, {})

    def numbers(self, words: Iterable[str | None]) -> list[int]:
        """Return the number of each string."""
        return list(map(self._numbers.__getitem__, words))

    def column(self, codes: npt.NDArray[np.int32]) -> pa.DictionaryArray:
        """Return numbers [n] as a column of strings."""
        words = self._numbers.written
        if len(self._array) < len(words):
            self._array = texts(len(words), {i: word.encode() for i, word in enumerate(words)})
        known = codes >= 0
        indices = numbers(pa.int32(), codes, None if known.all() else known)
        return pa.DictionaryArray.from_arrays(indices, self._array, safe=False)


def _bits(valid: Bools | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _offsets(n: int, places: list[int], lengths: list[int]) -> tuple[Bools, pa.Buffer]:
    valid, ends = np.zeros(n, bool), np.zeros(n + 1, np.int32)
    valid[places] = True
    ends[np.array(places, np.int64) + 1] = lengths
    return valid, pa.py_buffer(np.cumsum(ends, dtype=np.int32))
