"""What holds for every rule."""

import numpy as np
import pytest
from frames_by_hand import Bench, grads, noisy, value, weight

from trainprobe.errors import PlanError
from trainprobe.monitor.rules import load_rule, rule_names


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
