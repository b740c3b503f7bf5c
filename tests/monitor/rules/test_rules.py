"""Each rule on series made by hand: what it must find, and what it must not."""

import math

import numpy as np
import pytest
from frames_by_hand import Bench, grads, value

from trainprobe.errors import PlanError
from trainprobe.monitor.rules import load_rule, rule_names


def weight(name, norm, shape=(4, 4)):
    return value("forward", "parameter", name, "value", shape, norm=norm, absmax=norm / 2, mean=norm / 9)


def output(name, norm, zeros=0.0):
    return value("forward", "module", name, "output", norm=norm, zero=zeros * 100, count=100)


def test_every_rule_has_a_docstring_with_a_source_and_a_check():
    for name in rule_names():
        rule = load_rule(name)
        assert rule.__doc__, name
        assert callable(rule.check)
        missing = [f for f, field in rule.Options.model_fields.items() if not field.description]
        assert not missing, (name, missing)


def test_an_unknown_rule_is_an_error_that_guesses_what_was_meant():
    with pytest.raises(PlanError, match="did you mean 'spike'"):
        load_rule("spikes")


# ---- spike


def noisy(rng, level=1.0):
    return float(level * np.exp(rng.normal(0, 0.1)))


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


def test_nothing_is_a_spike_before_the_warm_up():
    bench = Bench("spike")
    for step in range(60):
        bench.feed(loss=1.0 if step % 10 else 1e6)
    assert bench.found == []


# ---- drift, plateau


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


def rates(period=100):
    return (1e-2 * 0.5 * (1.01 + math.cos(math.pi * (step % period) / period)) for step in range(400))


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


def test_a_loss_that_stands_still_is_a_plateau_told_once():
    bench, rng = Bench("plateau", window=200), np.random.default_rng(0)
    for _ in range(600):
        bench.feed(loss=2.0 + rng.normal(0, 0.05))
    assert [f.severity for f in bench.found] == ["info"]


def test_a_loss_that_still_falls_is_no_plateau():
    bench, rng = Bench("plateau", window=200), np.random.default_rng(0)
    for step in range(600):
        bench.feed(loss=2.0 - step / 1000 + rng.normal(0, 0.05))
    assert bench.found == []


# ---- frozen, dead


def test_a_parameter_with_a_gradient_that_does_not_move_is_frozen():
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"a": 0.1, "b": 0.1}), lr=1e-3)
    (found,) = bench.found
    assert (found.site.name, found.step) == ("a", 5)


@pytest.mark.parametrize(("gradient", "found"), [(1e-8, []), (1e-5, ["a"])])
def test_a_gradient_that_is_only_rounding_beside_the_others_need_not_move_a_parameter(gradient, found):
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"a": gradient, "b": 0.1}), lr=1e-3)
    assert [f.site.name for f in bench.found] == found


def test_a_parameter_without_a_gradient_is_frozen_on_purpose():
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"b": 0.1}))
    assert bench.found == []


def test_nothing_is_frozen_while_the_learning_rate_is_zero():
    bench = Bench("frozen", patience=5)
    for _ in range(10):
        bench.feed(weight("a", 1.0), *grads({"a": 0.1}), lr=0.0)
    assert bench.found == []


def test_the_fingerprint_decides_where_there_is_one():
    bench = Bench("frozen", patience=3)
    for step in range(8):
        bench.feed(
            value("forward", "parameter", "a", "value", norm=1.0, checksum=2**63 + step),
            value("forward", "parameter", "b", "value", norm=1.0, checksum=2**63),
            *grads({"a": 0.1, "b": 0.1}),
        )
    assert [f.site.name for f in bench.found] == ["b"]


def test_without_gradients_only_a_parameter_that_once_moved_can_be_frozen():
    bench = Bench("frozen", patience=4)
    for step in range(12):
        bench.feed(weight("never", 1.0), weight("stopped", 1.0 + min(step, 3)))
    assert [f.site.name for f in bench.found] == ["stopped"]


def test_an_output_of_zeros_is_dead_after_its_patience():
    bench = Bench("dead", patience=5)
    for step in range(12):
        bench.feed(output("relu", 1.0, 0.5 if step < 3 else 1.0), output("other", 1.0, 0.9))
    (found,) = bench.found
    assert (found.site.name, found.step) == ("relu", 7)


def test_a_gradient_of_exactly_zero_is_dead_and_a_tiny_one_is_not():
    bench = Bench("dead", patience=3)
    for _ in range(5):
        bench.feed(*grads({"gone": 0.0, "tiny": 1e-30}))
    assert [f.site.name for f in bench.found] == ["gone"]


# ---- flow, update ratio


@pytest.mark.parametrize(("factor", "word"), [(4.0, "vanishes"), (0.25, "explodes")])
def test_a_gradient_that_changes_by_a_factor_a_layer_breaks_the_flow(factor, word):
    bench = Bench("flow", patience=3)
    for _ in range(4):
        bench.feed(*grads({f"layers.{i}.mlp.weight": factor**i for i in range(8)}))
    (found,) = bench.found
    assert word in found.message
    assert found.measured == pytest.approx(4.0**7)


def test_a_gradient_of_about_the_same_size_in_all_layers_flows():
    bench, rng = Bench("flow", patience=3), np.random.default_rng(0)
    for _ in range(20):
        bench.feed(*grads({f"layers.{i}.mlp.weight": noisy(rng, 1.3**i) for i in range(12)}))
    assert bench.found == []


def test_scattered_sizes_are_no_slope():
    bench, rng = Bench("flow", patience=1), np.random.default_rng(0)
    for _ in range(20):
        bench.feed(*grads({f"layers.{i}.w": float(np.exp(rng.normal(0, 4))) for i in range(24)}))
    assert bench.found == []


def test_an_update_larger_than_its_weight_is_out_of_range():
    bench = Bench("update_ratio")
    for step in range(30):
        update = value("optimizer", "parameter", "w", "update", norm=0.001 if step < 20 else 3.0)
        bench.feed(weight("w", 1.0), update)
    (found,) = bench.found
    assert (found.site.name, found.measured) == ("w", 3.0)


def test_a_weight_whose_norm_leaps_is_out_of_range_even_where_updates_are_not_collected():
    bench = Bench("update_ratio")
    for step in range(30):
        bench.feed(weight("w", 1.0 if step < 20 else 3.0 ** (step - 19)))
    assert len(bench.found) == 1


def test_a_bias_or_a_single_number_is_not_judged_by_its_update_ratio():
    for shape, expected in (((4,), 0), ((1, 1), 0), ((1, 2), 1)):
        bench = Bench("update_ratio")
        for _ in range(30):
            bench.feed(weight("b", 1e-6, shape), value("optimizer", "parameter", "b", "update", shape, norm=1.0))
        assert len(bench.found) == expected


def test_an_update_that_vanishes_is_out_of_range_unless_the_learning_rate_is_zero():
    for rate, expected in ((1e-3, 1), (0.0, 0)):
        bench = Bench("update_ratio")
        for _ in range(80):
            bench.feed(weight("w", 1.0), value("optimizer", "parameter", "w", "update", norm=1e-12), lr=rate)
        assert len(bench.found) == expected


# ---- loss scale, mean deviation, threshold


def test_a_loss_scale_that_is_searched_downwards_at_the_start_is_in_order():
    bench = Bench("loss_scale")
    for step in range(100):
        bench.feed(loss_scale=2.0 ** max(14, 32 - step))
    assert bench.found == []


def test_a_loss_scale_that_is_halved_step_by_step_later_collapses():
    bench = Bench("loss_scale")
    for step in range(80):
        bench.feed(loss_scale=65536.0 / 2 ** max(0, step - 49))
    assert [f.step for f in bench.found] == [55]


def test_a_loss_scale_below_one_is_a_collapse_at_once():
    assert len(Bench("loss_scale").feed(loss_scale=0.5)) == 1


def test_mean_deviation_has_the_formula_of_the_existing_rule():
    bench, h = Bench("mean_deviation", threshold=1.0, warmup=5), 1.0
    rng = np.random.default_rng(0)
    xs = np.exp(rng.normal(0, 0.5, 200))
    expected, calm = [], True
    for step, x in enumerate(xs):
        off = step >= 5 and x > h * 2
        if off and calm:
            expected.append(step)
        calm = not off
        h = x if step == 0 else 0.99 * h + 0.01 * x
        bench.feed(*grads({"w": float(x)}))
    assert [f.step for f in bench.found] == expected
    assert expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_mean_deviation_is_not_poisoned_and_absent_values_do_not_fire(bad):
    bench = Bench("mean_deviation", threshold=1.0, warmup=5)
    for step in range(40):
        bench.feed(*([] if step % 3 == 0 else grads({"w": bad if step == 20 else 1.0})))
    assert bench.found == []
    assert len(bench.feed(*grads({"w": 5.0}))) == 1


def test_a_zero_history_does_not_fire_the_mean_deviation():
    bench = Bench("mean_deviation", threshold=1.0, warmup=5)
    for step in range(30):
        bench.feed(*grads({"w": 0.0 if step < 20 else 1.0}))
    assert [f.step for f in bench.found if f.expected == 0] == []


def test_a_value_beyond_its_threshold_fires_once_until_it_is_back():
    bench = Bench("threshold", limit=10.0)
    for x in (1.0, 11.0, 12.0, 1.0, math.inf):
        bench.feed(*grads({"w": x}))
    assert [f.step for f in bench.found] == [1, 4]


def test_limits_below_and_above_can_be_given_for_a_scalar():
    bench = Bench("threshold", limit=None, low=0.5, high=2.0, names="loss")
    for x in (1.0, 0.4, 1.0, 2.1):
        bench.feed(loss=x, other=99.0)
    assert [f.step for f in bench.found] == [1, 3]


@pytest.mark.parametrize("rule", ["flow", "update_ratio"])
def test_other_values_that_appear_later_in_the_step_mix_nothing_up(rule):
    bench, rng = Bench(rule), np.random.default_rng(0)
    for step in range(60):
        values = [weight("bias", 1e-3, (4,)), *grads({"bias": 1e-9})]
        for layer in range(6):
            extra = [value("forward", "parameter", f"layers.{layer}.w", "exp_avg", norm=1e-12 * 10**layer)] if step > 20 else []
            values += [weight(f"layers.{layer}.w", noisy(rng, 1.0)), *extra, *grads({f"layers.{layer}.w": noisy(rng, 0.1)})]
        bench.feed(*values)
    assert bench.found == []
