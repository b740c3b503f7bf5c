"""The 64-bit fingerprint of a tensor's bits: the same number on every device and in every library.

Definition. Let w_0 … w_{n-1} be the elements in row-major (logical) order as unsigned words of 32 bits: an element of 1 or 2
bytes is its bit pattern extended with zeros, one of 4 bytes is a word, one of 8 or 16 bytes is two or four words, lowest bits
first (complex128: those of the real part, then those of the imaginary part). All further arithmetic is modulo 2^64:

    mix(x)      = x ^= x >> 32; x *= M; x ^= x >> 32; x *= M; x ^= x >> 32        M = 0xD6E8FEB86659FD93
    K(j)        = mix((j + 1) · G)                                                G = 0x9E3779B97F4A7C15
    key(p)      = K(p mod 256) XOR K(256 + ⌊p / 256⌋)
    term(w, p)  = (w XOR low half of key(p)) · (w with its halves swapped XOR high half of key(p)) + G
    fingerprint = Σ term(w_p, p)

The sum makes it independent of the order of reduction and lets shards be added: a shard whose words are numbered by their
place in the global tensor adds up, over the shards, to the fingerprint of the whole. The key makes it sensitive to swaps. A
word costs one multiplication of 32 by 32 bits, which every processor does for several words at once; the keys of a row of 256
words differ from those of the first row by one XOR.

Where it comes from: a sum of products of words with keys is the hash NH (J. Black, S. Halevi, H. Krawczyk, T. Krovetz and
P. Rogaway, "UMAC", 1999); here both factors hold the same word, so that each word has a term of its own. Keys that are looked
up digit by digit of a number are tabulation hashing (A. Zobrist, 1970). The halves are swapped because flipping bit k changes a
term by a multiple of 2^min(k, (k + 16) mod 32), which is 2^15 at most: 49 bits or more tell sets of flipped bits apart,
sign bits too. `mix` is the rrmxmx-style finaliser of D. Lemire's and P. Evensen's family of mixers (constant of "degski64");
G is 2^64 divided by the golden ratio, as in splitmix64 (Steele, Lea and Flood, 2014). It is an error-detecting code and no
protection against an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

M = 0xD6E8FEB86659FD93
G = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
ROW = 256  # words whose keys differ from those of the first so many by one XOR

U64 = npt.NDArray[np.uint64]


def mix(x: U64) -> U64:
    """Mix 64-bit words [n] (see the module text)."""
    m, half = np.uint64(M), np.uint64(32)
    x = x ^ (x >> half)
    x = x * m
    x = x ^ (x >> half)
    x = x * m
    return x ^ (x >> half)


def hashed(j: U64) -> U64:
    """Return K of numbers [n] (see the module text)."""
    return mix((j + np.uint64(1)) * np.uint64(G))


def keys(place: U64) -> U64:
    """Return the keys of words at these places, [n]."""
    row = np.uint64(ROW)
    return hashed(place % row) ^ hashed(row + place // row)


def words(array: npt.NDArray[Any]) -> U64:
    """Return the words of an array in row-major order, each below 2^32, as uint64 [n · words_each(itemsize)]."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{min(flat.dtype.itemsize, 4)}").astype(np.uint64)


def words_each(itemsize: int) -> int:
    """Return how many words an element of so many bytes is."""
    return max(itemsize // 4, 1)


def terms(word: U64, key: U64) -> U64:
    """Return what words [n] with these keys [n] add to the fingerprint, [n]."""
    half, low = np.uint64(16), np.uint64(0xFFFFFFFF)
    swapped = (word << half | word >> half) & low
    return (word ^ (key & low)) * (swapped ^ (key >> np.uint64(32))) + np.uint64(G)


def fingerprint(array: npt.NDArray[Any], index: U64 | int = 0) -> int:
    """Return the fingerprint of a NumPy array. The reference that every other implementation is tested against.

    index: place of the first element in the global tensor, or the places of all elements, [n].
    """
    bits, each = words(array), words_each(array.dtype.itemsize)
    at = np.arange(array.size, dtype=np.uint64) + np.uint64(index) if isinstance(index, int) else index
    with np.errstate(over="ignore"):
        place = (at[:, None] * np.uint64(each) + np.arange(each, dtype=np.uint64)).reshape(-1)
        return int(terms(bits, keys(place)).sum(dtype=np.uint64))


def joined(fingerprints: Sequence[int]) -> int:
    """Return one fingerprint for several tensors in their order: t ← t · P XOR f, from t = how many, modulo 2^64.

    P = 2^40 + 0x1B3 is the prime of the hash FNV-1a (Fowler, Noll and Vo).
    """
    total = len(fingerprints)
    for fingerprint in fingerprints:
        total = (total * 0x100000001B3 ^ fingerprint) & MASK
    return total


def shard_fingerprint(array: npt.NDArray[Any], offset: Sequence[int], global_shape: Sequence[int]) -> int:
    """Return the share of a shard in the fingerprint of the global tensor.

    offset, global_shape: where the shard begins in the global tensor and how large that is, a number a dimension. The
    shares of shards that cover the whole exactly once add up, modulo 2^64, to the fingerprint of the whole.
    """
    place = np.zeros((), np.uint64)
    for size, start, whole in zip(array.shape, offset, global_shape, strict=True):
        place = place[..., None] * np.uint64(whole) + np.arange(start, start + size, dtype=np.uint64)
    return fingerprint(array, place.reshape(-1))
