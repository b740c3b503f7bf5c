"""The mean deviation of mindstudio-probe."""

import math

import numpy as np
import pytest
from frames_by_hand import Bench, grads


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
