"""Spikes: jumps of the loss and of gradients, and what is none."""

import math
import random

import numpy as np
import pytest
import torch
from frames_by_hand import Bench, grads, noisy, output, weight

import trainprobe
from trainprobe.engine.core.records import Site


def test_a_jump_of_the_loss_is_a_spike():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(loss=noisy(rng) * 2)
    (found,) = bench.feed(loss=6.0)
    assert found.site.name == "loss"
    assert found.expected == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_a_jump_of_a_loss_that_still_falls_steeply_is_a_spike(seed):
    """Its older values reach 1.9, so that 4.75 has p up to 10^-4 beside all that is remembered."""
    bench, chance = Bench("spike"), random.Random(seed)
    for step in range(150):
        bench.feed(loss=2 * math.exp(-step / 100) + 0.3 + chance.gauss(0, 0.02))
    assert bench.found == []
    assert len(bench.feed(loss=4.75)) == 1


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


def test_a_spike_names_the_first_jump_and_counts_the_others():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(100):
        bench.feed(*grads({"a": noisy(rng), "b": noisy(rng), "c": noisy(rng)}))
    (found,) = bench.feed(*grads({"a": 60.0, "b": 90.0, "c": 1.0}))
    assert found.site.name == "a"
    assert "so did 1 of 3 gradients" in found.message


def test_spikes_close_together_are_one_event_whose_last_step_is_told():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    hits = []
    for step in range(120):
        x = {100: 20.0, 103: 30.0, 106: 500.0}.get(step) or noisy(rng)
        hits += [step] if bench.feed(grad_norm=x) else []
    assert hits == [100]
    assert [(f.count, f.last_step) for f in bench.watcher.incident.told] == [(3, 106)]


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


LAYERS = [f"layers.{i}.weight" for i in range(12)]


def feed_all(bench, rng, times=1.0, loss=1.0, common=None, **more):
    """Feed a step whose gradients share the noise of its batch."""
    shared = noisy(rng) if common is None else common
    norms = {name: 0.01 * shared * noisy(rng) * times for name in LAYERS}
    return bench.feed(*grads(norms), loss=2.0 * shared * loss, lr=1e-3, **more)


def test_a_batch_that_moves_every_layer_is_told_of_the_loss_with_what_else_moved_and_what_did_not():
    """Case c02 with a bad batch."""
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(150):
        feed_all(bench, rng)
    (found,) = feed_all(bench, rng, times=7.0, loss=3.0)
    assert (found.site.name, found.step) == ("loss", 150)
    assert "12 of 12 gradients" in found.message and "no rate and no weight jumped" in found.message
    assert "look at the batch of step 150" in found.next


def test_gradients_that_jump_together_are_a_spike_where_each_alone_would_be_none():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(150):
        feed_all(bench, rng)
    assert feed_all(bench, rng, times=8.0) == []  # a healthy GPT was seen at 12, and its loss did not move
    for _ in range(8):
        feed_all(bench, rng)
    assert len(feed_all(bench, rng, times=20.0)) == 1
    alone = Bench("spike")
    for _ in range(150):
        alone.feed(*grads({name: noisy(rng) for name in LAYERS}))
    assert alone.feed(*grads({name: 8.0 if name == LAYERS[3] else noisy(rng) for name in LAYERS})) == []


def test_noise_with_heavy_tails_is_hardly_ever_a_spike():
    """Squared errors of Student's t with 1.5 degrees of freedom, in the loss and in all gradients alike: a power of 0.75."""
    told = 0
    for seed in range(8):
        bench, rng = Bench("spike"), np.random.default_rng(seed)
        for _ in range(500):
            told += len(feed_all(bench, rng, common=float(np.mean(rng.standard_t(1.5, 64) ** 2))))
    assert told <= 2  # one step in 2,000 has p < 5e-4, the line for a loss of eight times all before


def test_a_loss_close_to_zero_that_varies_by_decades_does_not_hide_a_bad_batch():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(200):
        feed_all(bench, rng, common=float(1e-3 * np.exp(1.2 * rng.normal())))
    assert bench.found == []
    assert [f.site.name for f in feed_all(bench, rng, common=1.0)] == ["loss"]


def test_a_rate_that_leaves_its_schedule_is_the_incident_and_what_follows_is_counted_with_it():
    """Case c02 with a wrong rate."""
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(240):
        high = 150 <= step < 153
        after = 150 < step < 170
        bench.feed(
            *grads({"w": noisy(rng) * (50 if after else 1)}), loss=noisy(rng) * (30 if after else 1), lr=0.3 if high else 3e-3
        )
    (found,) = bench.found
    assert (found.site.name, found.step, found.measured) == ("lr", 150, 0.3)
    assert "100 times the largest so far" in found.message
    assert [f.last_step for f in bench.watcher.incident.told] in ([169], [])


def test_a_rate_that_has_been_rising_is_told_as_the_cause_of_a_spike():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(160):
        high = 3.0 if step == 159 else 1.0
        bench.feed(*grads({name: noisy(rng) * high for name in LAYERS}), loss=noisy(rng) * high, lr=1e-3 * 1.02**step)
    (found,) = bench.found
    assert found.site.name == "loss"
    assert "The learning rate lr has risen to " in found.message and "learning rate" in found.next


def test_another_optimizer_has_a_rate_of_its_own(tmp_path):
    """As in DeepXDE, whose L-BFGS of rate 1 goes on behind Adam of rate 0.001."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 1), torch.randn(32, 4), torch.randn(32, 1)
    loss_of = torch.nn.functional.mse_loss
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"console": False, "sinks": [], "audit": False}
    with trainprobe.watch(model, optimizer, level="off", monitor=True, output=tmp_path, **options) as probe:
        for step in range(60):
            if step == 40:
                optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)

            def closure(optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                return loss

            with probe.step():
                optimizer.step(closure)
        probe.flush()
        (found,) = [f for f in probe.findings if f.rule == "spike"]
    assert (found.severity, found.step, found.site.name) == ("info", 40, "lr")
    assert "when another optimizer took the place of the first" in found.message


@pytest.mark.parametrize("kind", ["restarts", "warm-up", "cut"])
def test_a_schedule_is_no_spike_of_the_rate(kind):
    bench, rng = Bench("spike"), np.random.default_rng(0)
    rates = {
        "restarts": lambda step: 1e-2 * (0.505 + 0.495 * math.cos(math.pi * (step % 60) / 60)),
        "warm-up": lambda step: 1e-2 * min(1.0, (step + 1) / 200),
        "cut": lambda step: 1e-2 * 0.1 ** (step // 80),
    }
    for step in range(260):
        bench.feed(loss=noisy(rng), lr=rates[kind](step))
    assert bench.found == []


@pytest.mark.parametrize("factor", [20.0, 0.1])
def test_a_weight_that_was_written_is_named_before_all_that_follows(factor):
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(160):
        weights = [weight(name, (1 + 1e-4 * step) * (factor if step >= 150 and name == "b" else 1)) for name in "abc"]
        jump = 40 if step >= 150 else 1
        bench.feed(
            *weights, *[output(name, noisy(rng) * (jump if name != "a" else 1)) for name in "abc"], loss=noisy(rng) * jump
        )
    (found,) = bench.found
    assert (found.site.name, found.site.slot, found.step) == ("b", "value", 150)
    assert f"its norm is {1.015 * factor:.4g} and was 1.015 at the step before" in found.message


def test_the_first_layer_whose_output_jumps_is_named_and_not_the_largest_jump_behind_it():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for _ in range(150):
        bench.feed(output("root", noisy(rng)), *[output(f"layers.{i}", noisy(rng)) for i in range(4)], loss=noisy(rng))
    heights = {0: 1.0, 1: 1.0, 2: 30.0, 3: 900.0}
    (found,) = bench.feed(output("root", 90.0), *[output(f"layers.{i}", heights[i]) for i in range(4)], loss=9.0)
    assert found.site.name == "layers.2"


def test_a_batch_out_of_the_ordinary_is_told_of_what_the_model_was_given():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    given = ("forward", Site("module", "root", "input.0"), (4, 4))
    for _ in range(150):
        bench.feed((*given, {"norm": noisy(rng)}), output("layers.0", noisy(rng)), loss=noisy(rng))
    (found,) = bench.feed((*given, {"norm": 12.0}), output("layers.0", 12.0), loss=12.0)
    assert found.site.name == "loss"
    assert "the model was given 12" in found.message and found.next == "look at the batch of step 150"


@pytest.mark.parametrize(("name", "severity"), [("difficulty", "info"), ("accuracy", "warning"), ("epoch", "warning")])
def test_a_jump_that_a_noted_setting_announces_is_a_note_and_a_measured_number_announces_nothing(name, severity):
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(240):
        feed_all(
            bench, rng, **{"loss": 1.0 if step < 150 else 6.0, "times": 1.0 if step < 150 else 6.0, name: float(step < 150)}
        )
    (found,) = bench.found
    assert (found.severity, found.step) == (severity, 150)
    assert ("changed from 1 to 0" in found.message) == (severity == "info")


def test_after_an_announced_change_the_new_level_is_known_at_once():
    bench, rng = Bench("spike"), np.random.default_rng(0)
    for step in range(200):
        feed_all(bench, rng, loss=1.0 if step < 150 else 6.0, difficulty=float(step >= 150), times=20.0 if step == 190 else 1.0)
    assert [(f.step, f.severity) for f in bench.found] == [(150, "info"), (190, "warning")]
