"""The 64-bit fingerprint of a tensor's bits: the same number on every device and in every library.

Definition, all arithmetic modulo 2^64. Let w_0 … w_{n-1} be the elements in row-major (logical) order, each taken as
its unsigned bit pattern and extended with zeros to 64 bits (a complex128 element is two words: real, imaginary; all
other complex elements are one word of their own size). Then

    mix(x) = x ^= x >> 32; x *= M; x ^= x >> 32; x *= M; x ^= x >> 32        M = 0xD6E8FEB86659FD93
    fingerprint = Σ mix(w_i + (i + 1) · G)                                    G = 0x9E3779B97F4A7C15

The sum makes it independent of the order of reduction and lets shards be added: a shard whose elements are numbered by
their place in the global tensor adds up, over the shards, to the fingerprint of the whole. The position inside `mix` makes it
sensitive to swaps. `mix` is the rrmxmx-style finaliser published by D. Lemire and P. Evensen's family of mixers (constant of
"degski64"); G is 2^64 divided by the golden ratio, as in splitmix64 (Steele, Lea and Flood, 2014). It is an error-detecting
code and no protection against an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

M = 0xD6E8FEB86659FD93
G = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64-bit words [n] (see the module text)."""
    m, half = np.uint64(M), np.uint64(32)
    x = x ^ (x >> half)
    x = x * m
    x = x ^ (x >> half)
    x = x * m
    return x ^ (x >> half)


def words(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the bit patterns of an array's elements in row-major order, as uint64 [n] (2n for complex128)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.itemsize == 16:
        return flat.view(np.uint64)
    return flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)


def fingerprint(array: npt.NDArray[Any], index: npt.NDArray[np.uint64] | int = 0) -> int:
    """Return the fingerprint of a NumPy array. The reference that every other implementation is tested against.

    index: position of the first word in the global tensor, or the positions of all words, [n] (2n for complex128).
    """
    bits = words(array)
    with np.errstate(over="ignore"):
        place = np.arange(bits.size, dtype=np.uint64) + np.uint64(index) if isinstance(index, int) else index
        return int(mix(bits + (place + np.uint64(1)) * np.uint64(G)).sum(dtype=np.uint64))


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
    place = place.reshape(-1)
    if array.dtype.itemsize == 16:
        place = np.stack((place * np.uint64(2), place * np.uint64(2) + np.uint64(1)), axis=-1).reshape(-1)
    return fingerprint(array, place)
