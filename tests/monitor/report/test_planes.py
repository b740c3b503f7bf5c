"""The bytes of a heatmap say what the numbers said."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trainprobe.monitor.report import planes


def norms(rng, shape):
    return np.exp(rng.normal(0, 2, shape)) * np.exp(rng.normal(0, 1, (1, shape[1], 1)))


def test_a_norm_comes_back_within_one_and_a_half_percent():
    values = norms(np.random.default_rng(0), (2, 5, 400)) ** 0.4
    packed = planes.pack(values)
    assert np.max(np.abs(planes.decode(packed.codes, packed) / values - 1)) < 0.015


def test_one_outlier_of_1e30_costs_the_other_numbers_no_resolution():
    values = norms(np.random.default_rng(1), (1, 3, 4000)) ** 0.4
    values[0, 1, 77] = 1e30
    packed = planes.pack(values)
    error = np.abs(planes.decode(packed.codes, packed) / values - 1)
    assert np.quantile(error, 0.998) < 0.015
    assert np.isclose(planes.decode(packed.codes, packed)[0, 1, 77], 1e30, rtol=1e-6)


def test_nan_infinities_zero_and_missing_are_five_different_codes():
    values = np.array([[[1.0, np.nan, np.inf, -np.inf, 0.0, 5.0]]])
    missing = np.array([[[False, False, False, False, False, True]]])
    codes = planes.pack(values, missing).codes[0, 0]
    assert codes.tolist()[1:] == [planes.NAN, planes.INFINITY, planes.NEGATIVE_INFINITY, planes.ZERO, planes.MISSING]


def test_a_missing_cell_is_missing_even_when_it_holds_nan():
    codes = planes.pack(np.full((1, 1, 2), np.nan), np.array([[[True, False]]])).codes
    assert codes[0, 0].tolist() == [planes.MISSING, planes.NAN]


def test_signed_numbers_keep_their_sign():
    values = np.random.default_rng(2).normal(0, 1, (1, 4, 300))
    packed = planes.pack(values)
    shown = planes.decode(packed.codes, packed)
    clear = np.abs(values) > 0.05
    assert packed.scale == "symlog"
    assert np.array_equal(np.sign(shown[clear]), np.sign(values[clear]))


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, (1, 2, 12), elements=st.floats(1e-30, 1e30)), st.integers(2, 5))
def test_a_bucket_shows_the_largest_and_the_smallest_of_its_steps(values, every):
    packed = planes.pack(values)
    high, low = planes.bucket(packed.codes, every)
    for j in range(high.shape[-1]):
        part = packed.codes[..., j * every : (j + 1) * every]
        assert np.array_equal(high[..., j], part.max(-1))
        assert np.array_equal(low[..., j], part.min(-1))


def test_a_nan_in_a_bucket_shows_in_its_largest_and_in_its_smallest():
    packed = planes.pack(np.array([[[1.0, np.nan, 3.0, 2.0]]]))
    high, low = planes.bucket(packed.codes, 2)
    assert high[0, 0, 0] == low[0, 0, 0] == planes.NAN
    assert planes.NAN not in (high[0, 0, 1], low[0, 0, 1])


def test_cells_where_nothing_was_recorded_do_not_lower_a_bucket():
    packed = planes.pack(np.array([[[2.0, 1.0, 3.0]]]), np.array([[[False, True, False]]]))
    _, low = planes.bucket(packed.codes, 3)
    assert low[0, 0, 0] == packed.codes[0, 0, 0]


def test_the_spread_is_the_decades_between_the_smallest_and_the_largest_rank():
    packed = planes.pack(np.array([[[1.0, 2.0]], [[100.0, 2.0]]]))
    assert packed.spread is not None
    assert np.allclose(packed.spread, [[2.0, 0.0]])
