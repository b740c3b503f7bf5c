"""Merging partials of parts gives the partials of the whole, and finished numbers are those of torch and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats.partials import STATISTICS, STATS, STD, SUBNORMAL, finish, merge

ANY = st.floats(width=64, allow_subnormal=True)


def partials(*tensors: torch.Tensor) -> np.ndarray:
    stats_rows = TorchStatsRows(STATS | STD | SUBNORMAL)
    for t in tensors:
        stats_rows.add(t)
    return stats_rows.drain()[0]


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in what is counted, near in what is added."""
    names = ("max", "min", "nan", "inf", "zero", "count", "absmax", "sublow")
    one, other = finish(a, STATISTICS), finish(b, STATISTICS)
    exact = all(np.array_equal(one[name], other[name], equal_nan=True) for name in names)
    return exact and np.allclose(one["norm"], other["norm"], rtol=1e-12, atol=0, equal_nan=True)


@given(st.lists(ANY, max_size=20), st.lists(ANY, max_size=20))
def test_merging_two_parts_gives_the_whole(a: list[float], b: list[float]) -> None:
    one, other, whole = (torch.tensor(x, dtype=torch.float64) for x in (a, b, a + b))
    assert close(merge(partials(one), partials(other)), partials(whole))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40), st.integers(0, 40))
def test_std_and_mean_of_merged_parts_are_those_of_the_whole(numbers: list[float], cut: int) -> None:
    t = torch.tensor(numbers)
    got = finish(merge(partials(t[:cut]), partials(t[cut:])), ["std", "mean"])
    x = t.double().numpy()
    assert got["mean"][0] == pytest.approx(x.mean(), rel=1e-12, abs=1e-9 * (1 + np.abs(x).mean()))
    assert got["std"][0] == pytest.approx(x.std(ddof=1), rel=1e-9, abs=1e-9 * (1 + np.abs(x).max()))


def test_merging_does_not_depend_on_the_order() -> None:
    a, b = partials(torch.randn(50)), partials(torch.randn(70))
    assert merge(a, b).tobytes() == merge(b, a).tobytes()


def test_an_empty_part_changes_nothing() -> None:
    a = partials(torch.randn(50))
    assert merge(a, partials(torch.zeros(0))).tobytes() == a.tobytes()


def test_zeros_merged_with_the_tiny_keep_the_norm_of_the_tiny() -> None:
    zeros, tiny = partials(torch.zeros(4).double()), partials(torch.full((4,), 1e-300, dtype=torch.float64))
    assert finish(merge(zeros, tiny))["norm"][0] == pytest.approx(2e-300)


@pytest.mark.parametrize(
    ("numbers", "want"),
    [
        ([1.0, float("nan")], ("nan", "nan", "nan", "nan")),
        ([1.0, float("inf")], ("inf", "1.0", "inf", "inf")),
        ([1.0, -float("inf")], ("1.0", "-inf", "-inf", "inf")),
        ([float("inf"), -float("inf")], ("inf", "-inf", "nan", "inf")),
        ([], ("nan", "nan", "nan", "0.0")),
    ],
)
def test_non_finite_elements_show_as_ieee_arithmetic_has_them(numbers: list[float], want: tuple[str, ...]) -> None:
    got = finish(partials(torch.tensor(numbers, dtype=torch.float32)))
    assert tuple(str(float(got[name][0])) for name in ("max", "min", "mean", "norm")) == want


def test_many_large_numbers_merged_with_a_larger_one_keep_their_share_of_the_norm() -> None:
    many, one = torch.full((300_000,), 2.0**479, dtype=torch.float64), torch.tensor([2.0**481], dtype=torch.float64)
    for a, b in ((many, one), (one, many)):
        norm = finish(merge(partials(a), partials(b)))["norm"][0]
        assert norm == pytest.approx(2.0**479 * 300_016**0.5, rel=1e-13)
