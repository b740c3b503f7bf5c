"""The flow of gradients over depth."""

import numpy as np
import pytest
from frames_by_hand import Bench, grads, noisy


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
