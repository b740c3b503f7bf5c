"""Distances between values: what statistics say of them is never more than NumPy's float64 says of all elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainprobe.dump_compare.intervals import by_statistics

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


def test_equal_statistics_of_other_bits_say_so():
    found = by_statistics({"norm": 1.0}, {"norm": 1.0}, 4, False)
    assert (found.low, found.high, found.evidence) == (0.0, math.inf, "bits")
