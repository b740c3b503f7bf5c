"""The fingerprint and the CRC-32 of a tensor's bits by torch's integer operations, on any device.

Both equal their references bit for bit: `engine.stats.checksum.fingerprint` and `zlib.crc32`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_chunks import chunks
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.checksum import MASK, ROW, G, M, words_each

_LOW = 0xFFFFFFFF
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _signed(x: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def words(x: Tensor) -> Tensor:
    """Return the words of a 1-D tensor's elements, each below 2^32, as int64 [n · words_each(itemsize)]."""
    x = x.detach().contiguous()
    size = x.element_size()
    if size == 16:
        x = torch.view_as_real(x).reshape(-1)
    bits = x.view(_SIGNED[min(size, 4)])
    return bits.to(torch.int64) & ((1 << 8 * min(size, 4)) - 1)


def mix(x: Tensor) -> Tensor:
    """Mix int64 words [n] as the definition says; shifts are made logical by masking."""
    m = _signed(M)
    x = x ^ ((x >> 32) & _LOW)
    x = x * m
    x = x ^ ((x >> 32) & _LOW)
    x = x * m
    return x ^ ((x >> 32) & _LOW)


def hashed(j: Tensor) -> Tensor:
    """Return K of numbers, int64 [n], as the definition says."""
    return mix((j + 1) * _signed(G))


def consecutive_keys(place: int, n: int, device: torch.device) -> Tensor:
    """Return the keys of n words from `place` on, int64 [n]."""
    first, last = place // ROW, (place + n - 1) // ROW
    rows = hashed(torch.arange(ROW + first, ROW + last + 1, dtype=torch.int64, device=device))
    keys = rows.unsqueeze(-1) ^ hashed(torch.arange(ROW, dtype=torch.int64, device=device))
    return keys.reshape(-1)[place - first * ROW :][:n]


def terms(word: Tensor, key: Tensor) -> Tensor:
    """Return what words [n] with these keys [n] add to the fingerprint, less G each, int64 [n]."""
    swapped = ((word << 16) | (word >> 16)) & _LOW
    return (word ^ (key & _LOW)) * (swapped ^ ((key >> 32) & _LOW))


def fingerprint_of_chunk(x: Tensor, place: int) -> tuple[Tensor, int]:
    """Return the share of a 1-D chunk in the fingerprint, int64 [], and its number of words; place: of its first word."""
    bits = words(x)
    n = bits.numel()
    return terms(bits, consecutive_keys(place, n, bits.device)).sum() + _signed(n * G), n


def fingerprint_at(x: Tensor, place: Tensor) -> Tensor:
    """Return the share of a 1-D chunk in the fingerprint, int64 []; place: of each element in the whole tensor, int64 [n]."""
    each = words_each(x.element_size())
    if each > 1:
        place = (place.unsqueeze(-1) * each + torch.arange(each, dtype=torch.int64, device=place.device)).reshape(-1)
    bits = words(x)
    return terms(bits, hashed(place % ROW) ^ hashed(place // ROW + ROW)).sum() + _signed(bits.numel() * G)


def row_fingerprints(t: Tensor) -> Tensor:
    """Return the fingerprint of each index of dimension 0 by itself, int64 [t.shape[0]] on the tensor's device."""
    with torch.no_grad():
        bits = words(t.detach().resolve_conj().resolve_neg().reshape(-1)).reshape(t.shape[0], -1)
        n = bits.shape[1]
        return terms(bits, consecutive_keys(0, n, bits.device)).sum(dim=1) + _signed(n * G)


_POLYNOMIAL = 0xEDB88320  # CRC-32 of zlib, reflected


def _shift_one(crc: int) -> int:
    """Advance a CRC register by one zero byte."""
    for _ in range(8):
        crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


def _apply(columns: Sequence[int], x: int) -> int:
    """Multiply a 32-bit vector by a matrix over GF(2) given by its columns."""
    out = 0
    for i, column in enumerate(columns):
        if x >> i & 1:
            out ^= column
    return out


@cache
def _shift_columns(level: int) -> tuple[int, ...]:
    """Return the matrix that advances a CRC register by 2^level zero bytes."""
    if level == 0:
        return tuple(_shift_one(1 << i) for i in range(32))
    half = _shift_columns(level - 1)
    return tuple(_apply(half, column) for column in half)


@lru_cache(maxsize=256)
def _shift_table(level: int, device: torch.device) -> Tensor:
    """Return the advance by 2^level bytes as four tables, one a byte of the register, int64 [4, 256]."""
    columns = _shift_columns(level)
    tables = [[_apply(columns, byte << (8 * k)) for byte in range(256)] for k in range(4)]
    return torch.tensor(tables, dtype=torch.int64).to(device, non_blocking=True)


def _advance(x: Tensor, level: int) -> Tensor:
    """Advance CRC registers, int64 of any shape, by 2^level zero bytes."""
    t = _shift_table(level, x.device)
    # take, not an index: an index that is a 0-d tensor would be read, and so waited for
    return t[0].take(x & 255) ^ t[1].take((x >> 8) & 255) ^ t[2].take((x >> 16) & 255) ^ t[3].take((x >> 24) & 255)


def crc32_of_chunk(x: Tensor, before: Tensor) -> Tensor:
    """Continue the CRC-32 register `before` (int64 []) over the bytes of a 1-D chunk, on its device, waiting for nothing.

    The register of n bytes is a tree of halves: r(ab) = advance(r(a), |b|) ^ r(b). Zeros in front change nothing.
    """
    real = torch.view_as_real(x) if x.dtype.is_complex else x
    raw = real.contiguous().reshape(-1).view(torch.uint8)
    n = raw.numel()
    levels = max(n - 1, 0).bit_length()
    register = torch.zeros(1 << levels, dtype=torch.int64, device=raw.device)
    register[register.numel() - n :] = raw
    register = _advance(register, 0)
    for level in range(levels):
        pairs = register.view(-1, 2)
        register = _advance(pairs[:, 0], level) ^ pairs[:, 1]
    for level in range(n.bit_length()):
        if n >> level & 1:
            before = _advance(before, level)
    return before ^ register[0]


def crc32_register(t: Tensor, chunk: int = 1 << 16) -> Tensor:
    """Return zlib's CRC-32 of the row-major bytes of a tensor as int64 [] on its device; waits for nothing."""
    with torch.no_grad():
        register = torch.full((), _LOW, dtype=torch.int64, device=t.device)
        for piece in chunks(t.detach(), chunk):
            if piece.numel():
                register = crc32_of_chunk(piece.resolve_conj().resolve_neg(), register)
        return register ^ _LOW


def crc32_on_host(t: Tensor) -> int:
    """Return zlib's CRC-32 of the row-major bytes of a tensor that is on the CPU."""
    crc = 0
    with torch.no_grad():
        for piece in chunks(t.detach()):
            if piece.numel():
                plain = piece.resolve_conj().resolve_neg()
                real = torch.view_as_real(plain) if plain.dtype.is_complex else plain
                crc = zlib.crc32(real.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def share_of(t: Tensor, shard: Shard) -> Tensor:
    """Return the share of a shard in the fingerprint of the whole tensor, int64 [] on its device; waits for nothing."""
    with torch.no_grad():
        total, start = torch.zeros((), dtype=torch.int64, device=t.device), 0
        for chunk in chunks(t.detach()):
            at = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=t.device)
            total = total + fingerprint_at(chunk.resolve_conj().resolve_neg(), _places_in_whole(at, shard))
            start += chunk.numel()
        return total


def _places_in_whole(at: Tensor, shard: Shard) -> Tensor:
    """Return the places in the whole tensor, row by row, of these places in the shard, int64 [n]."""
    place, stride = torch.zeros_like(at), 1
    for size, offset, whole in zip(reversed(shard.shape), reversed(shard.offset), reversed(shard.whole), strict=True):
        place = place + (at % size + offset) * stride
        at, stride = at // size, stride * whole
    return place if shard.within is None else _places_in_whole(place, shard.within)
