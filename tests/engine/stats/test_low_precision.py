"""Underflow and overflow of low-precision formats: against rounding in float64, and against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.stats.exponents import exponent_histogram
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.capture.features import number_formats
from trainprobe.engine.capture.features.number_formats import CountedFormats
from trainprobe.engine.core.records import Place
from trainprobe.engine.stats.low_precision import FORMATS, limits_of, lost
from trainprobe.engine.tape import Tape

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


@pytest.fixture(params=[True, False], ids=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Count as on the host, or as on a device."""
    monkeypatch.setattr(number_formats, "on_host", lambda device: request.param)
    return request.param


def told(tensors: list[torch.Tensor], names: list[str], scale: float | str) -> list[dict[str, tuple[int, int]]]:
    """Count all tensors as the feature does; return for each of them name → elements that underflow and that overflow."""
    tape, dtype = Tape(TorchLibrary()), torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    counted = CountedFormats(tape, torch.device("cpu"), dtype, names, scale, True)
    slots = [f"{name}{i}" for name in names for i in range(2)]
    for i, t in enumerate(tensors):
        tape.feature(f"{i}", [*slots, "exponents"], counted.deferred, counted.add(t))
    counted.finish()
    features = tape.drain(0, Place(), framework="", level="off", task="statistics").features
    shares = {(f.name, f.slot): float(f.numbers[0]) for f in features if f.edges is None}
    whole = {f.name: f for f in features if f.edges is not None}
    for i, t in enumerate(tensors):
        want = exponent_histogram(t.double().numpy(), str(t.dtype))
        counts = want.negative + want.positive
        assert whole[f"{i}"].numbers.tolist() == (np.trim_zeros(counts).tolist() or [0])
        first = np.flatnonzero(counts)[0] if counts.any() else 0
        assert whole[f"{i}"].edges is not None and whole[f"{i}"].edges[0] == 2.0 ** (want.lowest + first)
    found: list[dict[str, tuple[int, int]]] = []
    for i, t in enumerate(tensors):
        sizes = {name: [shares[f"{i}", f"{name}{j}"] * t.numel() for j in range(2)] for name in names}
        assert all(abs(x - round(x)) < 1e-6 for pair in sizes.values() for x in pair)
        found.append({name: (round(under), round(over)) for name, (under, over) in sizes.items()})
    return found


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.7, 1e-3, 1e6])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_the_feature_counts_what_numpy_counts(dtype: torch.dtype, scale: float, where: bool) -> None:
    tensors = [torch.from_numpy(samples(name)).to(dtype) for name in FORMATS]
    tensors += [tensors[0][:9].clone(), tensors[1].repeat(7)[3:], tensors[2].view(-1, 2).t()]  # small, large, not contiguous
    arrays = [t.double().numpy() if dtype == torch.float64 else t.float().numpy() for t in tensors]
    want = [{name: lost(array, name, scale) for name in FORMATS} for array in arrays]
    assert told(tensors, list(FORMATS), scale) == want
    assert sum(under + over for counts in want for under, over in counts.values()) > 1000


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-30])
def test_a_limit_is_the_first_number_that_is_past_it(name: str, scale: float) -> None:
    for dtype in (np.float32, np.float64):
        kept, over = limits_of([FORMATS[name]], np.array([scale], dtype))[0]
        before = np.nextafter(kept, dtype(0))
        assert (lost(np.array([before]), name, scale)[0], lost(np.array([kept]), name, scale)[0]) == (1, 0)
        assert lost(np.array([over]), name, scale)[1] == 1
        assert lost(np.array([np.nextafter(over, dtype(0))]), name, scale)[1] == 0


def test_under_the_scale_of_its_largest_magnitude_nothing_overflows(where: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=generator) * size for size in (1e-5, 1.0, 3e30, 1e-38, 1e-44)]
    tensors.append(torch.randn(200_000, generator=generator).exp2())
    tensors[0][3] = 0.0
    most = float(np.finfo(np.float32).max)  # a scale that float32 cannot hold becomes the largest that it can
    for t, found in zip(tensors, told(tensors, list(FORMATS), "amax"), strict=True):
        for name, form in FORMATS.items():
            scale = min(float(np.float32(form.largest)) / float(t.abs().max()), most)
            assert found[name] == (lost(t.numpy(), name, float(scale))[0], 0)


def test_infinities_overflow_under_any_scale_and_a_tensor_of_zeros_loses_nothing(where: bool) -> None:
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 4.0])
    for scale in (1.0, 0.1, "amax"):
        found = told([torch.zeros(5), odd, odd[:3], -odd], list(FORMATS), scale)
        assert [set(counts.values()) for counts in found] == [{(0, 0)}, {(0, 2)}, {(0, 2)}, {(0, 2)}]
