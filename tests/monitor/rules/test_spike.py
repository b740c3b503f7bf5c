"""Spikes: jumps of the loss and of gradients, and what is none."""

import math

import numpy as np
import pytest
from frames_by_hand import Bench, grads, noisy


def test_a_jump_of_the_loss_is_a_spike():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(loss=noisy(rng) * 2)
    (found,) = bench.feed(loss=6.0)
    assert found.site.name == "loss"
    assert found.expected == pytest.approx(2.0, rel=0.1)


def test_one_spike_does_not_hide_the_next():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    hits = []
    for step in range(200):
        x = 1e9 if step in (100, 130, 160) else noisy(rng)
        if bench.feed(*grads({"w": x})):
            hits.append(step)
    assert hits == [100, 130, 160]


def test_a_nan_does_not_poison_the_history_of_a_spike():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(100):
        bench.feed(grad_norm=math.nan if step % 7 == 0 else noisy(rng))
    assert len(bench.feed(grad_norm=50.0)) == 1


def test_a_climb_is_no_spike():
    bench = Bench("spike")
    for step in range(300):
        bench.feed(*grads({"w": 1.02**step}))
    assert bench.found == []


def test_a_spike_names_the_largest_jump_and_counts_the_others():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(*grads({"a": noisy(rng), "b": noisy(rng), "c": noisy(rng)}))
    (found,) = bench.feed(*grads({"a": 20.0, "b": 90.0, "c": 1.0}))
    assert found.site.name == "b"
    assert "1 other series jumped" in found.message


def test_spikes_close_together_are_one_event_unless_one_is_much_higher():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    hits = []
    for step in range(120):
        x = {100: 20.0, 103: 30.0, 106: 500.0}.get(step) or noisy(rng)
        hits += [step] if bench.feed(grad_norm=x) else []
    assert hits == [100, 106]


@pytest.mark.parametrize(("height", "spikes"), [(20.0, 0), (60.0, 1)])
def test_the_gradient_of_one_parameter_is_a_spike_only_far_above_all_that_is_remembered(height, spikes):
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(*grads({"w": noisy(rng)}))
    assert len(bench.feed(*grads({"w": height}))) == spikes
    assert len(bench.feed(*grads({"w": 1.0}))) == 0


def test_a_height_that_was_there_before_is_no_spike_before_the_warm_up():
    bench = Bench("spike")
    for step in range(60):
        bench.feed(loss=1.0 if step % 10 else 1e6)
    assert bench.found == []


@pytest.mark.parametrize(("step", "height", "spikes"), [(10, 1e4, 0), (30, 500.0, 0), (30, 1e4, 1), (63, 1e4, 1)])
def test_before_the_warm_up_only_a_jump_far_above_all_before_is_a_spike(step, height, spikes):
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(step):
        bench.feed(*grads({"w": noisy(rng), "v": noisy(rng)}))
    found = bench.feed(*grads({"w": height, "v": 1.0}))
    assert [f.site.name for f in found] == ["w"] * spikes


def test_an_early_spike_does_not_hide_the_next():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    hits = [step for step in range(120) if bench.feed(*grads({"w": 1e4 if step in (30, 100) else noisy(rng)}))]
    assert hits == [30, 100]


def test_a_gradient_that_rounding_alone_made_is_not_said_to_have_spiked():
    """That of a bias before a normalisation, once the layer is in evaluation mode; a real jump is named before it."""
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(*grads({"bias": noisy(rng, 1e-8), "weight": noisy(rng), "other": noisy(rng)}))
    (found,) = bench.feed(*grads({"bias": 0.1, "weight": noisy(rng), "other": noisy(rng)}))
    assert found.site.name == "bias"
    assert "rounding alone made it until now" in found.message and "jumped" not in found.message
    assert "evaluation mode" in found.next
    bench = Bench("spike")
    for _ in range(100):
        bench.feed(*grads({"bias": noisy(rng, 1e-8), "weight": noisy(rng), "other": noisy(rng)}))
    (found,) = bench.feed(*grads({"bias": 0.1, "weight": 500.0, "other": noisy(rng)}))
    assert (found.site.name, "weight grad norm jumped to 500" in found.message) == ("weight", True)
