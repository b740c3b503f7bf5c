"""Drift: a level that creeps up, and what is none."""

import math

import numpy as np
import pytest
from frames_by_hand import Bench, grads, noisy, weight


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


def test_a_gradient_norm_that_grows_by_orders_where_nothing_clips_is_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(260):
        bench.feed(*grads({name: noisy(rng) * 1.12 ** max(0, step - 110) for name in "abc"}), loss=noisy(rng))
    first = bench.found[0]
    assert (first.site.name, first.severity) == ("gradient norm", "warning")
    assert 130 < first.step < 190


def test_a_weight_that_goes_off_by_itself_is_drift():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(260):
        off = 1.02 ** max(0, step - 110)
        bench.feed(*[weight(n, (5 + 0.2 * step / (step + 40)) * (off if n == "b" else 1)) for n in "abcd"], loss=noisy(rng))
    assert [f.site.name for f in bench.found] == ["b"]
    assert 110 < bench.found[0].step < 150


def test_weights_that_grow_together_or_as_they_always_did_do_not_go_off():
    bench = Bench("drift")
    for step in range(400):  # a head that began small, a rate that begins anew at step 200, and all weights of it
        grown = (1 + 0.004 * step) * (1.012 ** max(0, min(step, 300) - 200))
        bench.feed(*[weight(name, grown) for name in "abc"], weight("head", 0.01 * (1 + step) ** 0.9))
    assert [f for f in bench.found if "by itself" in f.message] == []


def rising(rng, step, gradients):
    """A loss that doubles between steps 150 and 300, with gradients that grow with a power of it."""
    level = 1 + min(max(step - 150, 0), 150) / 150
    return {"values": grads({name: noisy(rng) * level**gradients for name in "abc"}), "loss": noisy(rng) * level}


@pytest.mark.parametrize(("gradients", "severity"), [(0.5, "info"), (1.5, "warning")])
def test_a_loss_that_rises_alone_is_a_note_and_one_whose_gradients_grow_as_far_is_an_alarm(gradients, severity):
    """Where targets are bootstrapped, the loss rises with the values that are learnt, and gradients with its root."""
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(330):
        told = rising(rng, step, gradients)
        bench.feed(*told["values"], loss=told["loss"], lr=1e-3)
    assert {f.severity for f in bench.found if f.site.name == "loss"} == {severity}


def test_a_loss_that_rises_with_the_rate_is_an_alarm_that_says_so():
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(330):
        told = rising(rng, step, 0.0)
        bench.feed(*told["values"], loss=told["loss"], lr=1e-3 * 1.03 ** max(0, step - 150))
    assert bench.found[0].severity == "warning"
    assert "the learning rate rises too" in bench.found[0].message


@pytest.mark.parametrize(("name", "alarms"), [("difficulty", 0), ("reward", 1)])
def test_a_level_that_a_noted_setting_announces_is_no_drift(name, alarms):
    bench, rng = Bench("drift"), np.random.default_rng(0)
    for step in range(300):
        bench.feed(loss=noisy(rng) * (1 if step < 130 else 40), **{name: float(step >= 130)})
    assert bool(bench.found) == bool(alarms)
