"""Underflow and overflow of low-precision formats: against rounding in float64, and against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainprobe.engine.stats.low_precision import FORMATS, lost
from trainprobe.engine.taps.number_formats import lost_shares, magnitudes

# name → (bits of the mantissa, smallest normal exponent)
SHAPES = {"fp4_e2m1": (1, 0), "fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14), "fp16": (10, -14), "bf16": (7, -126)}
CASTS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16}


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """Round |x| to the nearest number of a format that goes on for ever upwards, ties to even, in float64."""
    mantissa, lowest = SHAPES[name]
    x = np.abs(x.astype(np.float64))
    exponent = np.maximum(np.frexp(np.where(x == 0, 1.0, x))[1] - 1, lowest)
    step = np.ldexp(1.0, exponent - mantissa)
    return np.rint(x / step) * step


def oracle(x: np.ndarray, name: str) -> tuple[int, int]:
    finite = np.where(np.isfinite(x), x, 0.0)
    back = rounded(finite, name)
    over = np.isinf(x) | (back > FORMATS[name].largest)
    return int(((finite != 0) & (back == 0)).sum()), int(over.sum())


def edge_cases(name: str) -> np.ndarray:
    """Numbers at, just below and just above every border of a format, of both signs."""
    told = FORMATS[name]
    borders = [told.smallest / 2, told.smallest, told.smallest * 1.5, told.largest, told.middle]
    near = [np.nextafter(np.float32(b), np.float32(d)) for b in borders for d in (0, np.inf)]
    x = np.array([*borders, *near, 0.0, np.inf, np.nan, 1.0], np.float32)
    return np.concatenate([x, -x])


def samples(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    low, high = np.log2(FORMATS[name].smallest) - 3, min(np.log2(FORMATS[name].largest) + 3, 127.9)
    x = np.exp2(rng.uniform(low, high, 20_000)) * rng.choice([-1, 1], 20_000)
    return np.concatenate([x.astype(np.float32), edge_cases(name)])


@pytest.mark.parametrize("name", FORMATS)
def test_the_smallest_and_the_largest_number_are_those_of_the_format(name: str) -> None:
    told = FORMATS[name]
    mantissa, lowest = SHAPES[name]
    assert told.smallest == 2.0 ** (lowest - mantissa)
    assert rounded(np.array([told.largest]), name)[0] == told.largest
    step = 2.0 ** (np.frexp(told.largest)[1] - 1 - mantissa)
    assert told.middle == told.largest + step / 2
    if name in CASTS:
        about = torch.finfo(CASTS[name])
        assert (about.max, about.smallest_normal) == (told.largest, 2.0**lowest)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_lost_is_what_rounding_in_float64_loses(name: str) -> None:
    x = samples(name)
    assert lost(x, name) == oracle(x, name)
    assert lost(x.astype(np.float64), name) == oracle(x, name)


@pytest.mark.parametrize("name", CASTS)
def test_what_is_lost_is_what_torch_casts_to_zero_or_to_no_number(name: str) -> None:
    x = samples(name)
    x = x[np.isfinite(x)]
    cast = torch.from_numpy(x).to(CASTS[name]).float()
    under = int(((cast == 0) & (torch.from_numpy(x) != 0)).sum())
    if name == "fp8_e4m3":  # has no infinity; torch makes NaN or the largest number of what is beyond it
        step = 2.0**5
        over = int(((torch.from_numpy(x).abs() > 448 + step / 2) & (cast.isnan() | (cast.abs() == 448))).sum())
    else:
        over = int((~cast.isfinite()).sum())
    assert lost(x, name) == (under, over)
    assert under > 100
    assert over > 3


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.7, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_device_counts_what_numpy_counts(name: str, dtype: torch.dtype, scale: float) -> None:
    t = torch.from_numpy(samples(name)).to(dtype)
    array = t.double().numpy() if dtype == torch.float64 else t.float().numpy()
    under, over = lost_shares(magnitudes(t), FORMATS[name], scale)
    want = lost(array, name, scale)
    assert (round(float(under) * t.numel()), round(float(over) * t.numel())) == want
    if dtype in (torch.float32, torch.float64):
        assert sum(want) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_under_the_scale_of_its_largest_magnitude_nothing_overflows(name: str) -> None:
    t = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-5
    t[3] = 0.0
    under, over = lost_shares(magnitudes(t), FORMATS[name], "amax")
    most = float(np.finfo(np.float32).max)  # a scale that float32 cannot hold becomes the largest that it can
    scale = np.float32(min(FORMATS[name].largest / float(t.abs().max()), most))
    assert round(float(under) * 1000) == lost(t.numpy(), name, float(scale))[0]
    assert float(over) == 0


def test_a_tensor_of_zeros_loses_nothing() -> None:
    for scale in (1.0, "amax"):
        assert [float(x) for x in lost_shares(torch.zeros(5), FORMATS["fp8_e4m3"], scale)] == [0.0, 0.0]
