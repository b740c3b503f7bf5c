"""The share of silent units, against a count in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.capture.features.dead_units import dead_share


@pytest.mark.parametrize(("shape", "unit"), [((6, 10), 1), ((2, 5, 10), 2), ((3, 10, 4, 4), 1), ((2, 10, 2, 2, 2), 1)])
def test_units_that_are_silent_everywhere_are_counted(shape, unit):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    moved = np.moveaxis(x, unit, 0)
    moved[[1, 4, 7]] = 0
    moved[2, ..., 0] = 0  # silent in one place only
    want = np.mean([np.all(np.abs(u) <= 0) for u in moved])
    assert want == pytest.approx(0.3)
    assert float(dead_share(torch.from_numpy(x), 0.0)) == pytest.approx(want)
    assert float(dead_share(torch.from_numpy(x), 100.0)) == 1


def test_a_nan_is_not_silent():
    assert float(dead_share(torch.tensor([[0.0, float("nan")], [0.0, 0.0]]), 0.0)) == 0.5


def test_the_monitor_tells_the_share_of_units_that_a_bias_has_silenced(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"fc": nn.Linear(4, 8), "act": nn.ReLU(), "out": nn.Linear(8, 2)})
    model["fc"].bias.data[:3] = -100
    forward = lambda x: model["out"](model["act"](model["fc"](x)))  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plan = {"level": "off", "sinks": ["memory"], "monitor": {"features": {"dead_units": True}}}
    with trainprobe.watch(model, optimizer, output=tmp_path, on_error="raise", **plan) as probe:
        probe.begin_step(0)
        x = torch.randn(64, 4)
        kept = torch.relu(model["fc"](x)).detach()
        forward(x).sum().backward()
        optimizer.step()
        (found,) = probe.end_step().features
    assert (found.name, found.slot) == ("act", "dead_units.output")
    assert found.numbers.tolist() == [pytest.approx(float((kept == 0).all(0).float().mean()))]
    assert found.numbers[0] >= 3 / 8
