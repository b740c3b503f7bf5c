"""The codes of quantised weights: how each kind is decoded, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainprobe.ckpt_compare.pieces import Array, Source
from trainprobe.ckpt_compare.quantised import Coded, Quantised
from trainprobe.engine.compare.number_formats import decode, number_format
from trainprobe.engine.geometry.rectangles import Point
from trainprobe.errors import FormatError

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # OCP MX, E2M1
_AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of a word that holds its first, second … column


def unpacked(words: Array, bits: int, count: int) -> Array:
    """Return `count` unsigned numbers of so many bits from the last axis of 32-bit words."""
    first = np.arange(count) * bits
    stream = np.ascontiguousarray(words).view(np.uint32).astype(np.uint64)
    behind = np.minimum(first // 32 + 1, stream.shape[-1] - 1)
    both = stream[..., first // 32] | stream[..., behind] << np.uint64(32)
    return (both >> (first % 32).astype(np.uint64) & np.uint64((1 << bits) - 1)).astype(np.float32)


def gaps(levels: Array) -> Array:
    """Return, for each level of a table, half the gap to the farther one of its neighbours."""
    known = np.unique(levels[np.isfinite(levels)])
    steps = np.diff(known) / 2
    wide = np.maximum(np.append(steps, 0), np.insert(steps, 0, 0))
    return wide[np.minimum(np.searchsorted(known, levels), len(known) - 1)].astype(np.float32)


def spread(scales: Array, shape: Point, start: int, stop: int, block: Any = None) -> Array:
    """Return scales of blocks, rows or a tensor for the rows start … stop−1 of codes of a shape."""
    if scales.size == 1:
        return scales.reshape((1,) * len(shape))
    scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    hints = [None] * (len(shape) - 2) + list(block or (None, None))
    index = [np.arange(n) // _block(n, held, hint) for n, held, hint in zip(shape, scales.shape, hints, strict=True)]
    return scales[np.ix_(index[0][start:stop], *index[1:])]


def _block(n: int, held: int, hint: Any) -> int:
    """Return how many elements of an axis share one of `held` scales; the last block may be smaller."""
    sizes = (n if held == 1 else 0, 1 if held == n else 0, hint, 128, n // held if held and n % held == 0 else 0, 64, 32, 16)
    found = next((size for size in sizes if isinstance(size, int) and size > 0 and -(-n // size) == held), None)
    if found is None:
        raise FormatError(f"{held} scales do not fit {n} rows or columns")
    return found


def _scales(source: Source, cut: slice) -> Array:
    """Return scales, of which bytes are powers of two (OCP MX, E8M0)."""
    bits = source.load()
    fmt = number_format("float8_e8m0fnu") if source.format.name == "uint8" else source.format
    return decode(np.ascontiguousarray(bits[cut] if bits.ndim else bits), fmt)


class EightBits(Quantised):
    """FP8 or int8 codes with scales, and integer zero points where they are asymmetric."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Coded:
        """Return some rows."""
        codes = self.parts["codes"]
        levels = self.held("codes", slice(start, stop)).astype(np.float32)
        halves: Any = 0.5
        if codes.format.mantissa is not None:
            table = decode(np.arange(256, dtype=np.uint8), codes.format)
            halves = gaps(table)[np.ascontiguousarray(codes.load()[start:stop])]
        scales: Any = 1.0
        if "scales" in self.parts:
            held = _scales(self.parts["scales"], slice(None))
            scales = spread(held, self.shape, start, stop, self.options["block"]) / self.options["over"]
        zeros = spread(self.held("zeros"), self.shape, start, stop) if "zeros" in self.parts else 0.0
        return Coded(levels, scales, zeros, halves)


class PackedIntegers(Quantised):
    """Integers that compressed-tensors packs along the rows, less half of their range."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Coded:
        """Return some rows."""
        bits, columns = self.options["bits"], self.shape[1]
        levels = unpacked(self.parts["codes"].load()[start:stop], bits, columns) - 2 ** (bits - 1)
        scales: Any = self._by_column(self.held("scales"), start, stop) if "scales" in self.parts else 1.0
        if "zeros" not in self.parts:
            return Coded(levels, scales)
        zeros = self.parts["zeros"].load()
        if zeros.dtype.itemsize == 4:
            zeros = unpacked(zeros.T, bits, self.shape[0]).T - 2 ** (bits - 1)
        return Coded(
            levels, scales, self._by_column(zeros, start, stop), _ends(levels, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )

    def _by_column(self, held: Array, start: int, stop: int) -> Array:
        if "groups" in self.parts:
            return held[start:stop][:, self.parts["groups"].load().astype(np.int64)]
        return spread(held, self.shape, start, stop)


def _ends(levels: Array, least: int, most: int) -> Array:
    """Return half gaps, and whole ones at both ends: what lies beyond is cut off where the zero point was rounded."""
    return np.where((levels <= least) | (levels >= most), np.float32(1), np.float32(0.5))


class Grouped(Quantised):
    """GPTQ (packed along the input) and AWQ (along the output, in its own order): scales and zeros are [groups, out]."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Coded:
        """Return some rows."""
        bits, columns = self.options["bits"], self.shape[1]
        words, zeros = self.parts["codes"].load(), self.parts["zeros"].load()
        if self.options["awq"]:
            first, last = start // 8, -(-stop // 8)
            order = (np.arange(8 * (last - first)).reshape(-1, 8)[:, _AWQ]).reshape(-1)[start - 8 * first : stop - 8 * first]
            levels, zeros = (unpacked(w[:, first:last], 4, 8 * (last - first))[:, order] for w in (words, zeros))
            levels = levels.T
        else:
            levels = unpacked(words[:, start:stop].T, bits, columns)
            zeros = unpacked(zeros, bits, self.shape[0])[:, start:stop] + (0 if self.options["second"] else 1)
        groups = len(zeros)
        index = (
            self.parts["groups"].load().astype(np.int64)
            if "groups" in self.parts
            else np.arange(columns) // -(-columns // groups)
        )
        scales: Any = self.held("scales", slice(None), slice(start, stop))[index].T if "scales" in self.parts else 1.0
        return Coded(levels, scales, zeros[index].T, _ends(levels, 0, 2**bits - 1))


class Blockwise(Quantised):
    """bitsandbytes' 4 bits: two codes a byte, the first one above, and a largest value for each block of the flat tensor."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Coded:
        """Return some rows."""
        inner = math.prod(self.shape[1:])
        first, last, size = start * inner, stop * inner, self.options["blocksize"]
        pairs = self.parts["codes"].load().reshape(-1)[first // 2 : -(-last // 2)]
        codes = np.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[first % 2 : first % 2 + last - first]
        table = self.held("table").astype(np.float32)
        shape = (stop - start, *self.shape[1:])
        scales: Any = 1.0
        if "scales" in self.parts:
            places = np.arange(first // size, -(-last // size))
            scales = np.repeat(self._largest(places), size)[first % size : first % size + last - first].reshape(shape)
        levels = table[codes].reshape(shape)
        loose = 0.03 if "nested" in self.parts else 0.0  # the largest values are quantised themselves
        return Coded(levels, scales, 0.0, gaps(table)[codes].reshape(shape) + loose * np.abs(levels))

    def _largest(self, places: Array) -> Array:
        stored = self.parts["scales"].load().reshape(-1)[places]
        if "nested" not in self.parts:
            return decode(stored, self.parts["scales"].format)
        largest = self.held("nested").reshape(-1)[places // self.options["nested_blocksize"]]
        return self.held("nested_table")[stored] * largest + np.float32(self.options["nested_offset"])


class Fp4(Quantised):
    """MXFP4 and NVFP4: two codes a byte, the first one below, a scale for 32 or 16 of them and, of NVFP4, one for all."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Coded:
        """Return some rows."""
        pairs = self.parts["codes"].load()[start:stop]
        shape = (stop - start, *self.shape[1:])
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(shape)
        scales: Any = 1.0
        if "scales" in self.parts:
            stored = _scales(self.parts["scales"], slice(start, stop))
            scales = np.repeat(stored, shape[-1] // stored.shape[-1], axis=-1).astype(np.float32)
        if "whole" in self.parts:
            whole_scale = np.float32(self.held("whole").reshape(-1)[0])
            scales = scales / whole_scale if self.options["divide"] else scales * whole_scale
        return Coded(_FP4[codes], scales, 0.0, gaps(_FP4)[codes])
