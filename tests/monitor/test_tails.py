"""The probability of a value beside recent ones: exact for tails that fall with a power, not too small for lighter ones."""

import numpy as np
import pytest

from trainprobe.monitor.tails import line, log_p, tail_of


def probabilities(draw, n, runs=200_000):
    rng = np.random.default_rng(0)
    drawn = np.concatenate([np.log(draw(rng, (runs // 10, n + 1))) for _ in range(10)])
    window, x = np.sort(drawn[:, :-1], axis=1), drawn[:, -1]
    return np.exp(log_p(x, *tail_of(window)))


@pytest.mark.parametrize("power", [0.75, 1.5, 4.0])
@pytest.mark.parametrize("n", [64, 128])
def test_of_a_power_law_as_many_values_are_below_a_probability_as_it_says(power, n):
    p = probabilities(lambda rng, shape: rng.pareto(power, shape) + 1, n)
    for line_ in (1e-2, 1e-3, 1e-4):
        assert np.mean(p < line_) == pytest.approx(line_, rel=0.35 if line_ > 1e-4 else 0.8)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, shape: np.exp(rng.normal(0, 1.5, shape)),
        lambda rng, shape: rng.gamma(2.0, 1.0, shape),
        lambda rng, shape: 3 + rng.uniform(0, 1, shape),
        lambda rng, shape: np.mean(rng.standard_t(3, (*shape, 8)) ** 2, axis=-1),
    ],
    ids=["lognormal", "gamma", "uniform", "squared errors"],
)
def test_of_lighter_tails_fewer_are(draw):
    p = probabilities(draw, 128, 50_000)
    assert np.mean(p < 1e-3) <= 1.4e-3
    assert np.mean(p < 1e-4) <= 2.5e-4


def test_the_line_of_a_probability_has_that_probability():
    window = np.sort(np.random.default_rng(1).normal(size=(5, 128)), axis=1)
    tail = tail_of(window)
    np.testing.assert_allclose(log_p(line(np.log(1e-6), *tail), *tail), np.log(1e-6))


def test_rows_that_nan_ends_are_as_if_they_were_shorter():
    row = np.sort(np.random.default_rng(2).normal(size=80))
    padded = np.concatenate([row, np.full(48, np.nan)])
    np.testing.assert_allclose(np.array(tail_of(padded[None])), np.array(tail_of(row[None])))
