"""What the partials of a tensor must be, from exact arithmetic on Python numbers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

from trainprobe.engine.arrays import triton_jobs, triton_rows
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows, native_in_use
from trainprobe.engine.stats.partials import PARTIALS

AT = {name: i for i, name in enumerate(PARTIALS)}
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

IMPLEMENTATIONS = [
    pytest.param(True, id="native", marks=pytest.mark.skipif(not native_in_use(), reason="the extension is not built")),
    pytest.param(False, id="torch"),
]
# `make test-triton` runs the tests of numbers with the Triton kernels too, under Triton's interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REDUCERS = [*IMPLEMENTATIONS, *([pytest.param("triton", id="triton")] if INTERPRETED else [])]

ALL_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32"),
        *("float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Believed(triton_rows.Trust):
    """Kernels that are used from the first tensor on."""

    def known(self, key: triton_rows.Key) -> bool:
        return True

    def proven(self, key: triton_rows.Key) -> bool:
        assert not self.refusal, self.refusal
        return key[0] in triton_jobs.KINDS and key[1] != 0


def rows_of(reducer: bool | str, flags: int) -> TorchStatsRows:
    """An empty row buffer: of the compiled kernel (True), of torch's operations (False), or of Triton's kernels."""
    if reducer != "triton":
        return TorchStatsRows(flags, native=bool(reducer))
    here = torch.device("cpu")
    triton_rows.DEVICES.add("cpu")
    triton_rows._trusts[here] = Believed(here)
    # fewer than on a device: the interpreter takes its time for each lane of a compensated sum
    triton_jobs._MERGE_LEVELS, triton_jobs._PARTS = 3, 8
    stats_rows = TorchStatsRows(flags, native=False)
    stats_rows._kernels = True
    return stats_rows


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(t: torch.Tensor) -> np.ndarray:
    """The unsigned bit patterns of a tensor's elements, row-major."""
    flat = t.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if t.element_size() == 16:
        return torch.view_as_real(flat).reshape(-1).view(torch.int64).numpy().view(np.uint64)
    return flat.view(BITS[t.element_size()]).numpy().view(f"u{t.element_size()}")


def elements(t: torch.Tensor) -> list[float | int]:
    """The elements as Python numbers, complex ones by magnitude, without rounding for all other dtypes."""
    flat = t.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if t.dtype.is_complex:
        parts = torch.view_as_real(flat).double().tolist()
        return [math.hypot(re, im) for re, im in parts]
    if t.dtype.is_floating_point:
        return flat.double().tolist() if t.element_size() > 1 else flat.float().double().tolist()
    if t.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return bits_of(t).tolist()
    return [int(x) for x in flat.tolist()]


def sample(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Draw ordinary numbers of a dtype; 64-bit integers use all their bits."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw, dtype=torch.float64) * 20
    if dtype.is_complex:
        return torch.complex(x, x.flip(0)).to(dtype)
    if dtype == torch.bool:
        return x > 0
    if dtype.is_floating_point:
        return x.abs().float().to(dtype) if "e8m0" in str(dtype) else x.float().to(dtype)
    if dtype in (torch.uint64, torch.int64):
        wild = torch.randint(-(2**63), 2**63 - 1, shape, generator=draw, dtype=torch.int64)
        return wild.view(torch.uint64) if dtype == torch.uint64 else wild
    return x.abs().to(torch.int64).to(dtype)


@dataclass(frozen=True)
class Truth:
    """Exact numbers: counts, extremes, and sums as fractions."""

    count: int
    nan: int
    posinf: int
    neginf: int
    zero: int
    min: float
    max: float
    sum: Fraction
    sumsq: Fraction
    m2: Fraction
    magnitude: Fraction  # Σ|x|


def truth(t: torch.Tensor) -> Truth:
    """Compute all partials exactly."""
    x = elements(t)
    finite = [Fraction(v) for v in x if math.isfinite(v)]
    real = [v for v in x if v == v]
    total, squares = sum(finite, Fraction(0)), sum((v * v for v in finite), Fraction(0))
    return Truth(
        count=len(x),
        nan=sum(v != v for v in x),
        posinf=sum(v == math.inf for v in x),
        neginf=sum(v == -math.inf for v in x),
        zero=sum(v == 0 for v in x),
        min=float(min(real, default=math.inf)),
        max=float(max(real, default=-math.inf)),
        sum=total,
        sumsq=squares,
        m2=squares - total * total / len(finite) if finite else Fraction(0),
        magnitude=sum((abs(v) for v in finite), Fraction(0)),
    )


def row_of(t: torch.Tensor, reducer: bool | str, flags: int = 1) -> np.ndarray:
    """The partials of one tensor."""
    stats_rows = rows_of(reducer, flags)
    assert stats_rows.add(t) == 0, stats_rows.refusal(t)
    return stats_rows.drain()[0][0]


def assert_true(row: np.ndarray, t: torch.Tensor) -> None:
    """Hold a row to the bounds that torch_arrays states."""
    want = truth(t)
    for name in ("count", "nan", "posinf", "neginf", "zero"):
        assert row[AT[name]] == getattr(want, name), name
    complex_slack = 2.0**-52 if t.dtype in COMPLEX else 0.0  # one unit in the last place: a root of a sum of squares
    assert row[AT["min"]] == pytest.approx(want.min, rel=complex_slack, abs=0)
    assert row[AT["max"]] == pytest.approx(want.max, rel=complex_slack, abs=0)
    total, squares = (
        Fraction(float(row[AT["sum"]])),
        Fraction(float(row[AT["sumsq"]])) * Fraction(4) ** int(row[AT["exponent"]]),
    )
    if t.dtype in (torch.int64, torch.uint64):
        assert float(row[AT["sum"]]) == float(want.sum)
        assert abs(squares - want.sumsq) <= want.sumsq / 2**44
    elif t.dtype == torch.float64:
        assert abs(total - want.sum) <= abs(want.sum) / 2**52 + want.magnitude / 2**80
        assert abs(squares - want.sumsq) <= want.sumsq / 2**51 + Fraction(2) ** -2100
    else:
        assert abs(total - want.sum) <= want.magnitude / 2**44
        assert abs(squares - want.sumsq) <= want.sumsq / 2**44
