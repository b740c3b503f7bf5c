"""Which element and which bit: two replicas of a tensor that should be equal and are not.

`flips` compares the bits of two tensors. `flip_behind` needs one tensor and the other's fingerprint only. Because the
fingerprint is a sum of one term a word (see `checksum`), a single flipped bit of word w at place p changes it by

    term(w XOR 2^k, p) - term(w, p)   modulo 2^64

and the one pair (p, k) that gives the difference that was seen is found by trying all; that another pair gives it by chance has
a probability of at most n · bits / 2^49.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.stats.checksum import MASK, U64, fingerprint, keys, terms, words, words_each
from trainprobe.errors import UsageError

# dtype → (bits of the exponent, bits of the mantissa); the bit above them is the sign
_LAYOUTS = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Flip:
    """One element whose bits differ. index: its place in the tensor. bits: which bits, 0 the lowest.

    part: "sign", "exponent", "mantissa" or "integer", of the highest of them. before, after: the bit patterns.
    """

    index: tuple[int, ...]
    bits: tuple[int, ...]
    part: str
    before: int
    after: int

    def __str__(self) -> str:
        place = "".join(f"[{i}]" for i in self.index) or "the only element"
        named = f"bit {self.bits[0]}" if len(self.bits) == 1 else f"bits {', '.join(map(str, self.bits))}"
        return f"{place}: {named} ({self.part}), {self.before:#x} against {self.after:#x}"


def flips(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: str | None = None, limit: int = 10) -> tuple[int, list[Flip]]:
    """Return (how many elements differ, the first `limit` of them) of two tensors of the same shape and dtype.

    dtype: what the elements are where NumPy has no name for it ("bfloat16" held as uint16). Raises UsageError for two tensors
    that cannot be replicas of each other.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise UsageError(
            f"replicas have one shape and dtype, these are {a.dtype} {a.shape} and {b.dtype} {b.shape}: "
            "compare the same parameter of ranks that hold the same part of it"
        )
    mine, other = _patterns(a), _patterns(b)
    places = np.flatnonzero(mine != other)
    name = dtype or str(a.dtype)
    few = [_flip(int(i), int(mine[i]), int(other[i]), a.shape, name, mine.size // max(1, a.size)) for i in places[:limit]]
    return int(places.size), few


def flip_behind(array: npt.NDArray[Any], other: int, dtype: str | None = None) -> Flip | None:
    """Return the single flipped bit that turns a tensor into one with the fingerprint `other`, or None where none does.

    Takes about 20 ns an element and bit.
    """
    difference = (other - fingerprint(array)) & MASK
    if difference == 0:
        return None
    parts, size = words(array), min(8, array.dtype.itemsize)
    for start in range(0, parts.size, _AT_ONCE):
        found = _search(parts[start : start + _AT_ONCE], start, min(32, size * 8), np.uint64(difference))
        if found is not None:
            i, half = divmod(found[0], words_each(size))
            held = _patterns(array)
            before = int(held[i])
            after = before ^ 1 << (32 * half + found[1])
            return _flip(i, before, after, array.shape, dtype or str(array.dtype), held.size // array.size)
    return None


def odd_one_out(replicas: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return which replicas (places in the list) differ from what most of them hold; empty where there is no majority."""
    held = [_patterns(array).tobytes() for array in replicas]
    most = max(set(held), key=held.count)
    return [i for i, text in enumerate(held) if text != most] if 2 * held.count(most) > len(held) else []


def _patterns(array: npt.NDArray[Any]) -> U64:
    """Return the bit patterns of the elements in row-major order, uint64 [n] (2n for complex128: real, imaginary)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{min(flat.dtype.itemsize, 8)}").astype(np.uint64)


def _search(part: U64, start: int, width: int, difference: np.uint64) -> tuple[int, int] | None:
    """Return (place of the word, bit) of the flip that changes the fingerprint by `difference`."""
    with np.errstate(over="ignore"):
        key = keys(np.arange(start, start + part.size, dtype=np.uint64))
        goal = terms(part, key) + difference
        for bit in range(width):
            hits = np.flatnonzero(terms(part ^ np.uint64(1 << bit), key) == goal)
            if hits.size:
                return start + int(hits[0]), bit
    return None


def _flip(word: int, before: int, after: int, shape: tuple[int, ...], dtype: str, words_each: int) -> Flip:
    changed = before ^ after
    bits = tuple(i for i in range(changed.bit_length()) if changed >> i & 1)
    exponent, mantissa = _LAYOUTS.get(dtype.rpartition(".")[2], (0, 0))
    top = bits[-1]
    part = "integer"
    if exponent:
        part = "mantissa" if top < mantissa else "exponent" if top < mantissa + exponent else "sign"
    index = tuple(int(i) for i in np.unravel_index(word // words_each, shape)) if shape else ()
    return Flip(index, bits, part, before, after)
