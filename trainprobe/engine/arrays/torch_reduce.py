"""Partials and fingerprints by torch's own operations: the same numbers on every device, with no wait for any.

Counts, min, max and fingerprint are equal, bit for bit, to those of the native kernel. Sums stay inside the bounds that
`engine.arrays.torch_arrays` states. Tensors are taken in chunks, so that temporaries stay below 16 MiB. Devices without
float64 accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_checksum import fingerprint_of_chunk
from trainprobe.engine.arrays.torch_chunks import CHUNK as MOST
from trainprobe.engine.arrays.torch_chunks import chunks
from trainprobe.engine.stats.partials import CHECKSUM, CHUNK, PARTIALS, STATS, STD, SUBNORMAL, WIDTH, uncomputed

_LOW = 0xFFFFFFFF
_UNSIGNED = {torch.uint16: (torch.int16, 0xFFFF), torch.uint32: (torch.int32, _LOW)}
_EXACT = (torch.int64, torch.uint64)
_PLAIN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_uncomputed = cache(uncomputed)
_COMPONENT = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# every dtype that has statistics, as far as this torch knows it
REDUCED: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)
SMALLEST_NORMAL = {
    torch.float16: 2.0**-14,
    torch.bfloat16: 2.0**-126,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
    torch.float8_e4m3fn: 2.0**-6,
    torch.float8_e5m2: 2.0**-14,
    torch.float8_e4m3fnuz: 2.0**-7,
    torch.float8_e5m2fnuz: 2.0**-15,
}


def accumulator(device: torch.device) -> torch.dtype:
    """Return the widest float dtype that a device adds in."""
    return torch.float32 if device.type == "mps" else torch.float64


def reduce_tensor(t: Tensor, flags: int) -> tuple[Tensor, Tensor | None]:
    """Reduce a tensor on its device: partials [12] (see engine.stats.partials) and the fingerprint as int64 [], or None.

    flags: STATS, CHECKSUM, STD, SUBNORMAL. Waits for nothing and changes nothing.
    """
    with torch.no_grad():
        t = t.detach()
        parts: list[Tensor] = []
        exact: list[Tensor] = []
        total: Tensor | None = None
        place = 0
        for chunk in chunks(t):
            chunk = chunk.resolve_conj().resolve_neg()
            if flags & STATS and chunk.numel():
                parts.append(_chunk_partials(chunk, flags, accumulator(chunk.device)))
                if chunk.dtype in _EXACT:
                    exact.append(_exact_halves(chunk))
            if flags & CHECKSUM:
                sum_here, words = fingerprint_of_chunk(chunk, place)
                total = sum_here if total is None else total + sum_here
                place += words
        row = _merge_parts(torch.stack(parts), t.numel(), bool(flags & STD)) if parts else _empty_row(t)
        if exact:
            row[PARTIALS.index("sum")] = _exact_sum(torch.stack(exact))
        for at in uncomputed(flags):
            row[at] = torch.nan
        return row, total


def write_rows(tensors: Sequence[Tensor], flags: int, block: Tensor, wide: torch.dtype) -> None:
    """Reduce tensors into the rows of a block of their device, int64 [n, >= 13], as `write_row` does.

    wide: the accumulating dtype of the device. Those of one chunk are finished together.
    """
    alone: list[int] = []
    parts: list[Tensor] = []
    sums: list[Tensor] = []
    with torch.no_grad():
        for i, t in enumerate(tensors):
            if not flags & STATS or not 0 < t.numel() <= MOST or t.dtype in _EXACT:
                write_row(t, flags, block[i])
                continue
            x = t.detach().reshape(-1).resolve_conj().resolve_neg()
            alone.append(i)
            parts.append(_chunk_partials(x, flags, wide))
            if flags & CHECKSUM:
                sums.append(fingerprint_of_chunk(x, 0)[0])
        if not parts:
            return
        bits = _rows_of_chunks(torch.stack(parts), flags).view(torch.int64 if wide == torch.float64 else torch.int32)
        if len(alone) == len(tensors):
            block[:, :WIDTH].copy_(bits)
            if sums:
                block[:, WIDTH].copy_(torch.stack(sums))
            return
        for k, i in enumerate(alone):
            block[i, :WIDTH].copy_(bits[k])
            if sums:
                block[i, WIDTH].copy_(sums[k])


def _rows_of_chunks(parts: Tensor, flags: int) -> Tensor:
    """Turn chunk partials [n, 15] of n tensors of one chunk each into their rows [n, 12]: what `_merge_parts` does with one."""
    part = dict(zip(CHUNK, parts.unbind(1), strict=True))
    total, q = part["sum"], part["sumsq"]
    row = {
        **part,
        "count": part["finite"] + part["nan"] + part["posinf"] + part["neginf"],
        "sum": torch.where(total.isfinite(), total + part["sum_lost"], total),
        "sumsq": q + part["sumsq_lost"],
        "exponent": torch.where(q > 0, part["exponent"], 0.0),
    }
    rows = torch.stack([*map(row.__getitem__, PARTIALS)], 1)
    for at in _uncomputed(flags):
        rows[:, at] = torch.nan
    return rows


def write_row(t: Tensor, flags: int, row: Tensor) -> None:
    """Reduce a tensor into a row of its device, int64 [>= 13]: the bits of the partials, and the fingerprint."""
    partials, checksum = reduce_tensor(t, flags)
    with torch.no_grad():
        row[:WIDTH].copy_(partials.view(torch.int64 if partials.dtype == torch.float64 else torch.int32))
        if checksum is not None:
            row[WIDTH].copy_(checksum)


def _empty_row(t: Tensor) -> Tensor:
    row = torch.zeros(WIDTH, dtype=accumulator(t.device), device=t.device)
    row[PARTIALS.index("count")] = t.numel()
    row[PARTIALS.index("min")], row[PARTIALS.index("max")] = torch.inf, -torch.inf
    return row


def _values(x: Tensor, wide: torch.dtype) -> Tensor:
    """Return elements as real numbers of the accumulating dtype: bool as 0 and 1, complex by magnitude."""
    if x.dtype.is_complex:
        return _magnitude(torch.view_as_real(x).to(wide))
    if x.dtype == torch.bool:
        return (x.view(torch.uint8) != 0).to(wide)
    if x.dtype in _UNSIGNED:
        signed, mask = _UNSIGNED[x.dtype]
        return (x.view(signed).to(torch.int64) & mask).to(wide)
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        return ((bits >> 32) & _LOW).to(wide) * 2.0**32 + (bits & _LOW).to(wide)
    return x.to(wide)


def real_values(t: Tensor) -> Tensor:
    """Return all elements as a 1-D tensor of real numbers in the widest float dtype of the device."""
    plain = t.detach().resolve_conj().resolve_neg().reshape(-1)
    return _values(plain, accumulator(plain.device))


def _magnitude(parts: Tensor) -> Tensor:
    """sqrt(re² + im²), scaled by a power of two where squares would leave the range; infinite if either part is."""
    a, b = parts[..., 0].abs(), parts[..., 1].abs()
    big = torch.maximum(a, b)
    if parts.dtype == torch.float32:
        return torch.hypot(a, b)
    exponent = torch.where(big > 2.0**480, -600.0, torch.where(big < 2.0**-480, 600.0, 0.0)).to(parts.dtype)
    up, down = torch.exp2(exponent), torch.exp2(-exponent)
    a, b = a * up, b * up
    root = torch.sqrt(a * a + b * b) * down
    return torch.where((parts[..., 0].abs() == torch.inf) | (parts[..., 1].abs() == torch.inf), torch.inf, root)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b and its rounding error, exactly (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def compensated_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum along dimension 0 as (sum, correction): halves are added pairwise and the errors kept."""
    error = torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        rest = x[2 * half :]
        x, lost = two_sum(x[:half], x[half : 2 * half])
        error = error + lost.sum(0)
        if rest.shape[0]:
            x = torch.cat((x, rest))
    return x[0], error


def _chunk_partials(x: Tensor, flags: int, wide: torch.dtype) -> Tensor:
    """Return [15]: nan, posinf, neginf, zero, min, max, s, c, q, qc, m2, exponent, subnormal, finite count, mean of a chunk."""
    v = x.to(wide) if x.dtype in _PLAIN else _values(x, wide)
    nan, pos, neg = v.isnan(), v == torch.inf, v == -torch.inf
    good = ~(nan | pos | neg)
    clean = v.where(good, 0.0)
    zero = torch.zeros((), dtype=wide, device=x.device)
    n_good = good.sum().to(wide)
    if x.dtype in (torch.float64, torch.complex128) and wide == torch.float64:
        s, c = compensated_sum(clean)
        big = clean.abs().amax()
        exponent = torch.where(big > 2.0**480, 600.0, torch.where((big < 2.0**-480) & (big > 0), -600.0, 0.0)).to(wide)
        q, qc = compensated_sum((clean * torch.exp2(-exponent)).square())
    else:
        s, c, exponent = clean.sum(), zero, zero
        q, qc = torch.dot(clean, clean) if wide != torch.float64 else clean.square().sum(), zero
    mean = torch.where(n_good > 0, (s + c) / n_good, 0.0)
    m2, subnormal = zero, zero
    if flags & STD:
        off = (clean - mean).where(good, 0.0)
        drift = off.sum()
        m2 = torch.where(n_good > 0, (off.square().sum() - drift * drift / n_good).clamp_min(0), 0.0)
    tiny = SMALLEST_NORMAL.get(_COMPONENT.get(x.dtype, x.dtype))
    if flags & SUBNORMAL and tiny is not None:
        subnormal = ((clean.abs() < tiny) & (clean != 0)).sum().to(wide)
    low, high = v.where(~nan, torch.inf).amin() + 0.0, v.where(~nan, -torch.inf).amax() + 0.0
    found = {
        **{
            "nan": nan.sum().to(wide),
            "posinf": pos.sum().to(wide),
            "neginf": neg.sum().to(wide),
            "zero": (v == 0).sum().to(wide),
        },
        **{"min": low, "max": high, "sum": s, "sum_lost": c, "sumsq": q, "sumsq_lost": qc},
        **{"m2": m2, "exponent": exponent, "subnormal": subnormal, "finite": n_good, "mean": mean},
    }
    return torch.stack([*map(found.__getitem__, CHUNK)])


def _merge_parts(parts: Tensor, count: int, wants_std: bool) -> Tensor:
    """Merge chunk partials [k, 15] of one tensor into its row [12]."""
    part = dict(zip(CHUNK, parts.unbind(1), strict=True))
    c, q, qc, m2, exponent = (part[name] for name in ("sum_lost", "sumsq", "sumsq_lost", "m2", "exponent"))
    good, mean = part["finite"], part["mean"]
    total, lost = compensated_sum(part["sum"])
    total_sum = torch.where(total.isfinite(), total + (lost + c.sum()), total)
    shared = torch.where(q > 0, exponent, -torch.inf).amax()
    shared = torch.where(shared == -torch.inf, 0.0, shared)
    scale = torch.exp2((exponent - shared).clamp_max(0))  # twice: its square may be smaller than the smallest number
    squares, squares_lost = compensated_sum(q * scale * scale)
    all_good = good.sum()
    whole = torch.where(all_good > 0, total_sum / all_good, 0.0)
    spread = m2.sum() + (good * (mean - whole).square()).sum() if wants_std and parts.shape[0] > 1 else m2[0]
    row = {
        **{name: part[name].sum() for name in ("nan", "posinf", "neginf", "zero", "subnormal")},
        **{"count": torch.full((), count, dtype=parts.dtype, device=parts.device)},
        **{"min": part["min"].amin(), "max": part["max"].amax(), "sum": total_sum, "m2": spread, "exponent": shared},
        "sumsq": squares + (squares_lost + (qc * scale * scale).sum()),
    }
    return torch.stack([row[name] for name in PARTIALS])


def _exact_halves(x: Tensor) -> Tensor:
    """Sum the high and the low 32 bits of 64-bit integers apart, int64 [2]; neither can overflow within a chunk."""
    bits = x.view(torch.int64) if x.dtype == torch.uint64 else x
    high = bits >> 32
    if x.dtype == torch.uint64:
        high = high & _LOW
    return torch.stack([high.sum(), (bits & _LOW).sum()])


def _exact_sum(halves: Tensor) -> Tensor:
    """Add the halves [k, 2] exactly and round once to float64."""
    wide = accumulator(halves.device)
    carried = halves[:, 1] >> 32
    high = halves[:, 0].sum() + carried.sum()
    low = (halves[:, 1] & _LOW).sum()
    high, low = high + (low >> 32), low & _LOW
    return (high >> 20).to(wide) * 2.0**52 + (((high & 0xFFFFF) << 32) | low).to(wide)
