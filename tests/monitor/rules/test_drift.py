"""Drift: a level that creeps up, and what is none."""

import math

import numpy as np
from frames_by_hand import Bench, noisy


def rates(period=100):
    return (1e-2 * 0.5 * (1.01 + math.cos(math.pi * (step % period) / period)) for step in range(400))


def test_a_loss_that_creeps_up_is_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(600):
        bench.feed(loss=2.0 * noisy(rng) * (1.0 if step < 300 else 1.005 ** (step - 300)))
    assert bench.found[0].site.name == "loss"
    assert 300 < bench.found[0].step < 420


def test_a_loss_that_falls_does_not_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(600):
        bench.feed(loss=noisy(rng) * (1 + 5 * math.exp(-step / 100)))
    assert bench.found == []


def test_the_noise_of_small_batches_is_no_drift():
    for seed in range(20):
        bench, rng = Bench("drift"), np.random.default_rng(seed)
        for _ in range(600):
            bench.feed(loss=math.exp(0.4 * rng.standard_normal()))
        assert bench.found == []


def test_a_loss_that_rises_after_a_warm_restart_is_no_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for rate in rates():
        bench.feed(loss=noisy(rng) * (1 + 200 * rate), lr=rate)  # three times as high while the rate is at its highest
    assert bench.found == []


def test_a_loss_that_goes_on_rising_after_a_warm_restart_is_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step, rate in enumerate(rates()):
        bench.feed(loss=noisy(rng) * (1 if step < 200 else 1.02 ** (step - 200)), lr=rate)
    assert [f.site.name for f in bench.found[:1]] == ["loss"]
    assert 200 < bench.found[0].step < 290


def test_a_loss_that_is_sometimes_below_zero_has_no_level_to_drift_from():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(400):
        bench.feed(loss=1e-8 * 1.05 ** min(step, 300) * rng.standard_normal())
    assert bench.found == []


def test_a_single_outlier_is_no_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(300):
        bench.feed(loss=1e8 if step == 200 else noisy(rng))
    assert bench.found == []
