"""Finished numbers are those of NumPy, and what is not finite shows as IEEE arithmetic has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats.partials import STATS, STD, SUBNORMAL, finish


def partials(*tensors: torch.Tensor) -> np.ndarray:
    rows = TorchStatsRows(STATS | STD | SUBNORMAL)
    for t in tensors:
        rows.add(t)
    return rows.drain()[0]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40))
def test_std_and_mean_are_those_of_numpy(numbers: list[float]) -> None:
    t = torch.tensor(numbers)
    got = finish(partials(t), ["std", "mean"])
    x = t.double().numpy()
    assert got["mean"][0] == pytest.approx(x.mean(), rel=1e-12, abs=1e-9 * (1 + np.abs(x).mean()))
    assert got["std"][0] == pytest.approx(x.std(ddof=1), rel=1e-9, abs=1e-9 * (1 + np.abs(x).max()))


@pytest.mark.parametrize("statistic", ["std", "sublow"])
def test_a_statistic_is_unknown_of_a_row_that_was_reduced_without_it(statistic: str) -> None:
    rows = TorchStatsRows(STATS)
    for t in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])):
        rows.add(t)
    np.testing.assert_array_equal(finish(rows.drain()[0], [statistic])[statistic], [np.nan, np.nan])


def test_zeros_beside_the_tiny_keep_the_norm_of_the_tiny() -> None:
    both = torch.cat([torch.zeros(4).double(), torch.full((4,), 1e-300, dtype=torch.float64)])
    assert finish(partials(both))["norm"][0] == pytest.approx(2e-300)


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


@pytest.mark.parametrize("larger_first", [True, False])
def test_many_large_numbers_beside_a_larger_one_keep_their_share_of_the_norm(larger_first: bool) -> None:
    many, one = torch.full((300_000,), 2.0**479, dtype=torch.float64), torch.tensor([2.0**481], dtype=torch.float64)
    norm = finish(partials(torch.cat([one, many] if larger_first else [many, one])))["norm"][0]
    assert norm == pytest.approx(2.0**479 * 300_016**0.5, rel=1e-13)
