"""Bin counts, exponent counts and quantiles: NumPy and torch ways against numpy.histogram, frexp and numpy.quantile."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.stats.exponents import exponent_histogram
from trainprobe.engine.arrays import torch_extras
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats.histogram import ExponentHistogram, bin_counts
from trainprobe.engine.stats.partials import STATS
from trainprobe.engine.stats.quantiles import quantiles
from trainprobe.errors import UsageError

NUMBERS = st.lists(st.floats(-100, 100, width=32), max_size=60)
EDGES = [-50.0, -1.0, 0.0, 0.5, 70.0]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@given(NUMBERS)
def test_bin_counts_are_those_of_numpy_histogram(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    want = np.histogram(x.astype(np.float64), EDGES)[0].tolist()
    assert bin_counts(x, EDGES).tolist() == want
    assert torch_extras.bin_counts(EDGES)(torch.from_numpy(x)).tolist() == want


def test_elements_on_edges_fall_right_and_the_last_edge_is_closed() -> None:
    x = np.array([-1.0, 0.0, 0.5, 70.0, -50.0, 71.0, math.nan, math.inf])
    assert bin_counts(x, EDGES).tolist() == [1, 1, 1, 2]
    assert torch_extras.bin_counts(EDGES)(torch.from_numpy(x)).tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("edges", [[1.0], [1.0, 1.0], [2.0, 1.0], [[0.0, 1.0]]])
def test_edges_that_do_not_increase_are_refused(edges: list[float]) -> None:
    with pytest.raises(UsageError, match="increasing"):
        bin_counts(np.zeros(3), edges)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exponent_counts_are_exact_and_leave_nothing_out(dtype: torch.dtype) -> None:
    t = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 40).to(dtype)
    t[:6] = torch.tensor([0.0, -0.0, float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).tiny, -1.0]).to(dtype)
    want: Counter[tuple[bool, int]] = Counter()
    for v in t.double().tolist() if t.element_size() > 1 else t.float().tolist():
        if v and math.isfinite(v):
            want[(v > 0, math.frexp(v)[1] - 1)] += 1
    found = ExponentHistogram.from_counts(torch_extras.exponent_counts(t).numpy(), str(dtype))
    counted = {(True, found.lowest + i): int(n) for i, n in enumerate(found.positive) if n}
    counted |= {(False, found.lowest + i): int(n) for i, n in enumerate(found.negative) if n}
    assert counted == dict(want)
    assert (found.zero, found.nan, found.count) == (int((t.float() == 0).sum()), 1, 500)
    by_numpy = exponent_histogram(t.float().numpy() if t.element_size() < 8 else t.numpy(), str(dtype))
    assert by_numpy.positive.tolist() == found.positive.tolist() and by_numpy.negative.tolist() == found.negative.tolist()


def test_subnormals_and_infinities_have_their_place_among_the_exponents() -> None:
    x = np.array([2.0**-149, -(2.0**-130), np.inf, -np.inf, 3e38], np.float32)
    found = exponent_histogram(x)
    assert (found.positive[0], found.negative[19], found.positive[-1], found.posinf, found.neginf) == (1, 1, 1, 1, 1)
    assert torch_extras.exponent_counts(torch.from_numpy(x)).sum() == 5


@given(NUMBERS.filter(bool), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_quantiles_are_those_of_numpy(numbers: list[float], levels: list[float]) -> None:
    x = np.array(numbers, np.float32)
    want = np.quantile(x.astype(np.float64), levels)
    assert quantiles(x, levels).tolist() == want.tolist()
    assert torch_extras.quantiles(levels)(torch.from_numpy(x)).numpy() == pytest.approx(want, rel=1e-15, abs=1e-13)


@pytest.mark.parametrize("numbers", [[], [1.0, math.nan]])
def test_quantiles_of_nothing_or_of_nan_are_nan(numbers: list[float]) -> None:
    x = np.array(numbers)
    assert np.isnan(quantiles(x, [0, 0.5])).all()
    assert torch_extras.quantiles([0, 0.5])(torch.from_numpy(x)).isnan().all()


def test_levels_outside_zero_and_one_are_refused() -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        quantiles(np.zeros(3), [1.5])


def test_extras_travel_with_the_rows_of_a_row_buffer() -> None:
    stats_rows = torch_extras.StatsRowsWithExtras(STATS, [torch_extras.bin_counts([0, 1, 2]), torch_extras.quantiles([0.5])])
    stats_rows.add(torch.tensor([0.5, 1.5, 1.6]))
    assert stats_rows.add(torch.empty(2, device="meta")) == -1
    stats_rows.add(torch.tensor([0.1]))
    assert stats_rows.drain()[0].shape == (2, 12)
    assert [[a.tolist() for a in row] for row in stats_rows.drain_extras()] == [[[1, 2], [1.5]], [[1, 0], [pytest.approx(0.1)]]]
    assert isinstance(stats_rows, TorchStatsRows) and stats_rows.drain()[0].shape == (0, 12) and stats_rows.drain_extras() == []
