"""The statistics and fingerprints that the device computes, against float64 on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows, reduce_row
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, PARTIALS, STATS

EXACT = ("count", "nan", "posinf", "neginf", "zero", "min", "max")
_LOOSE = 2.0**-20  # relative to Σ|x| and to Σx²: what float32 sums keep on a device without float64
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def samples(device: str, quick: bool) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, tensor on the device, the same on the host) in all dtypes that the device has, sizes and layouts."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 7, 1000, 65_537) if quick else (0, 1, 7, 1000, 65_537, 3_000_001)
    for dtype in _DTYPES:
        for size in sizes:
            host = torch.randn(size, generator=generator) * 30
            if size > 100 and dtype.is_floating_point:
                host[5], host[50], host[77] = torch.nan, torch.inf, -torch.inf
            host = host.to(dtype)
            try:
                there = host.to(device)
            except (RuntimeError, TypeError):  # the device has no such numbers
                break
            yield f"{dtype}[{size}]", there, host
            if size == 1000:
                yield f"{dtype}[40, 25] transposed", there.view(40, 25).t(), host.view(40, 25).t()


def disagreements(device: str, quick: bool) -> tuple[list[str], int, float]:
    """Return what is wrong, how many tensors were looked at, and the largest error of a sum relative to Σ|x| or Σx²."""
    told = list(samples(device, quick))
    partial_rows = TorchLibrary().stats_rows(STATS | CHECKSUM)
    rows = [partial_rows.add(there) for _, there, _ in told]
    partials, sums, _ = partial_rows.drain()
    assert sums is not None
    wrong: list[str] = []
    worst = 0.0
    for (name, _, host), row in zip(told, rows, strict=True):
        if row < 0:
            wrong.append(f"{name} was not reduced")
            continue
        array, plain = as_numpy(host)
        numbers, read_as = as_numpy(host.float() if plain.startswith("float8") else host)
        right = reduce_row(numbers, read_as, STATS)
        for at, column in enumerate(PARTIALS):
            if column in EXACT and not np.array_equal(partials[row, at], right[at], equal_nan=True):
                wrong.append(f"{name}: {column} is {partials[row, at]!r}, right is {right[at]!r}")
        wide = host.double()
        wide = wide[torch.isfinite(wide)].abs()
        for column, scale in (("sum", float(wide.sum())), ("sumsq", float(wide.square().sum()))):
            at = PARTIALS.index(column)
            error = abs(float(partials[row, at]) - float(right[at])) / (scale or 1.0)
            worst = max(worst, error)
            if not error <= _LOOSE:
                wrong.append(f"{name}: {column} is {partials[row, at]!r}, right is {right[at]!r}")
        here = NumpyStatsRows(CHECKSUM | CRC32)
        here.add(array, plain if not plain.startswith("float8") else "uint8")
        told_sums = here.drain()[1]
        if told_sums is not None and int(told_sums[0]) != int(sums[row]):
            wrong.append(f"{name}: the fingerprint is {int(sums[row]):016x}, right is {int(told_sums[0]):016x}")
    return wrong, len(told), worst


def as_numpy(t: torch.Tensor) -> tuple[npt.NDArray[Any], str]:
    """Return the elements of a host tensor, or the integers of their bits where NumPy lacks the dtype, and the dtype's name."""
    name = str(t.dtype).removeprefix("torch.")
    t = t.contiguous()
    if name == "bfloat16" or name.startswith("float8"):
        t = t.view(torch.int16 if name == "bfloat16" else torch.uint8)
    return t.numpy(), name
