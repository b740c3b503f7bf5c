"""Arrow arrays from NumPy arrays without a copy. `pa.array` would import pandas into the training where it is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]
T = TypeVar("T")


def bits(valid: Bools) -> pa.Buffer | None:
    """Return where a column [n] is not null, as Arrow keeps it; None where nothing is null."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def numbers(kind: pa.DataType, values: npt.NDArray[Any], valid: pa.Buffer | None = None) -> pa.Array:
    """Return numbers [n], whose dtype has as many bytes as the kind; valid: `bits` of where they are not null."""
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(np.ascontiguousarray(values))])


class Sparse(Generic[T]):
    """The things of a column that has few, in the order of their rows."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.things: list[T] = []

    def add(self, begin: int, places: Iterable[int], things: Iterable[T]) -> None:
        """Put things into rows, counted from `begin`, behind those that have one."""
        self.places.extend(map(begin.__add__, places))
        self.things.extend(things)


def texts(n: int, known: Sparse[bytes]) -> pa.Array:
    """Return n texts, given in UTF-8; the others are null."""
    if not known.places:
        return pa.nulls(n, pa.string())
    return pa.Array.from_buffers(pa.string(), n, [*_ends(n, known), pa.py_buffer(b"".join(known.things))])


def lists(n: int, known: Sparse[Any]) -> pa.Array:
    """Return n lists of float64; the others are null."""
    kind = pa.list_(pa.float64())
    if not known.places:
        return pa.nulls(n, kind)
    whole = np.concatenate(known.things, dtype=np.float64)
    return pa.Array.from_buffers(kind, n, [*_ends(n, known)], children=[numbers(pa.float64(), whole)])


def _ends(n: int, known: Sparse[Any]) -> tuple[pa.Buffer | None, pa.Buffer]:
    """Return where a column of things of any length is not null, and where each begins and ends."""
    valid, ends = np.zeros(n, bool), np.zeros(n + 1, np.int32)
    valid[known.places] = True
    ends[1:][known.places] = [*map(len, known.things)]
    return bits(valid), pa.py_buffer(np.cumsum(ends, dtype=np.int32))


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
        self._array = texts(0, Sparse())

    def numbers(self, words: Iterable[str | None]) -> list[int]:
        """Return the number of each string."""
        return list(map(self._numbers.__getitem__, words))

    def column(self, codes: npt.NDArray[np.int32]) -> pa.DictionaryArray:
        """Return numbers [n] as a column of strings."""
        words = self._numbers.written
        if len(self._array) < len(words):
            known = Sparse[bytes]()
            known.add(0, range(len(words)), map(str.encode, words))
            self._array = texts(len(words), known)
        indices = numbers(pa.int32(), codes, bits(codes >= 0))
        return pa.DictionaryArray.from_arrays(indices, self._array, safe=False)
