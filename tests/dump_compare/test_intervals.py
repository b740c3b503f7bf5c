"""Distances between values: what statistics say of them is never more than NumPy's float64 says of all elements."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.intervals import by_statistics, interval

NUMBERS = st.floats(-1e3, 1e3, width=32)


def statistics(x: np.ndarray) -> dict[str, float]:
    return {"norm": float(np.linalg.norm(x)), "max": float(x.max()), "min": float(x.min()), "mean": float(x.mean())}


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=NUMBERS), st.data())
def test_the_lower_end_is_a_bound(a, data):
    b = data.draw(arrays.arrays(np.float64, a.shape, elements=NUMBERS))
    scale = max(np.linalg.norm(a), np.linalg.norm(b))
    found = by_statistics(statistics(a), statistics(b), a.size, None)
    true = np.linalg.norm(a - b) / scale if scale else 0.0
    assert found.low <= true * (1 + 1e-9) + 1e-12


def test_the_upper_end_is_about_right_for_independent_errors():
    rng = np.random.default_rng(0)
    for n in (10, 1000, 100_000):
        a = rng.normal(size=n)
        b = a * (1 + 1e-3 * rng.normal(size=n))
        found = by_statistics(statistics(a), statistics(b), n, None)
        assert found.low <= np.linalg.norm(a - b) / np.linalg.norm(a) <= 30 * found.high


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_alone_is_infinitely_far(nonfinite):
    plain, other = {"norm": 1.0, "max": 1.0}, {"norm": abs(nonfinite), "max": nonfinite}
    assert by_statistics(plain, other, 4, None).low == math.inf
    assert by_statistics(other, dict(other), 4, None).high == 0.0


@pytest.mark.parametrize(("dtype", "same"), [("torch.int64", True), ("torch.float32", False)])
def test_sums_of_whole_numbers_that_another_tool_took_in_float32_are_no_difference(tmp_path, dtype, same):
    """Those of floats are; so are two roundings of other numbers, and extremes that differ."""
    numbers = np.arange(1000) + 7
    exact = {"Max": 1006.0, "Min": 7.0, "Mean": float(numbers.mean()), "Norm": float(np.linalg.norm(numbers.astype(float)))}
    single = {**exact, "Norm": float(np.float32(exact["Norm"])), "Mean": float(np.float32(exact["Mean"]))}
    other = {**single, "Norm": float(np.nextafter(np.float32(exact["Norm"]), np.float32(2e9)))}
    about = {"type": "torch.Tensor", "dtype": dtype, "shape": [1000], "requires_grad": False}
    found = []
    for i, pair in enumerate(((exact, single), (single, other), (exact, {**single, "Max": 1006.0001}))):
        sides = []
        for side, leaf in zip("ab", pair, strict=True):
            folder = tmp_path / f"{i}{side}"
            folder.mkdir()
            data = {"Torch.arange.0.forward": {"input_args": [], "input_kwargs": {}, "output": [{**about, **leaf}]}}
            (folder / "dump.json").write_bytes(orjson.dumps({"framework": "pytorch", "level": "L1", "data": data}))
            sides.append(Side(folder))
        values = [side.step_data.values[0] for side in sides]
        found.append(interval(sides[0], values[0], sides[1], values[1]).low)
    assert (found[0] == 0) == same
    assert found[1] > 0 and found[2] > 0


def test_equal_statistics_of_other_bits_say_so():
    found = by_statistics({"norm": 1.0}, {"norm": 1.0}, 4, False)
    assert (found.low, found.high, found.evidence) == (0.0, math.inf, "bits")
