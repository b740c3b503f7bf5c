"""Calls of torch that write to their arguments without a trace in version counters, and nodes that are passed twice."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import trainprobe
from trainprobe.engine.core.records import StepData, Value

NATIVE = pytest.mark.parametrize("native", [True, False])
LEVEL = pytest.mark.parametrize("level", ["L1", "mix"])


def recorded(folder, run, model=None, **plan) -> StepData:
    with trainprobe.watch(model or torch.nn.Identity(), output=folder, on_error="raise", **plan) as probe:
        probe.begin_step()
        run()
        step_data = probe.end_step()
    assert step_data is not None
    return step_data


def shown(step_data: StepData, name: str, statistic: str) -> list[list[float]]:
    """Return the statistic of each tensor that the calls of this name were given."""
    numbers = step_data.numbers()[statistic]
    calls = [call for call in step_data.calls if call.name == name and call.phase == "forward"]
    return [[numbers[x.row] for x in (*call.args, *(call.kwargs or {}).values()) if isinstance(x, Value)] for call in calls]


@NATIVE
@LEVEL
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_running_statistics_that_a_norm_has_written_are_shown_as_they_are(name, by_keyword, level, native, tmp_path):
    mean, var, x = torch.zeros(3), torch.ones(3), torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    before: list[list[float]] = []

    def run():
        for _ in range(3):
            before.append([x.norm().item(), mean.double().norm().item(), var.double().norm().item()])
            if by_keyword:
                getattr(functional, name)(x, running_mean=mean, running_var=var, **{_SWITCH[name]: True})
            else:
                getattr(functional, name)(x, mean, var, **{_SWITCH[name]: True})

    step_data = recorded(tmp_path / "out", run, level=level, native=native)
    assert before[0][1] != before[1][1] != before[2][1]
    assert shown(step_data, f"Functional.{name}", "norm") == [pytest.approx(row) for row in before]


_SWITCH = {"batch_norm": "training", "instance_norm": "use_input_stats"}


@NATIVE
@LEVEL
def test_the_overflow_that_unscaling_has_found_is_shown_where_the_scale_is_updated(level, native, tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)

    def run():
        scaler.scale(parameter.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()

    step_data = recorded(tmp_path / "out", run, level=level, native=native)
    assert scaler.get_scale() == 2.0  # torch found it
    (given,) = shown(step_data, "Torch._amp_update_scale_", "max")
    assert given == [4.0, 0.0, 1.0]  # the scale, its growth tracker, what was found


@NATIVE
@LEVEL
def test_both_gradients_of_a_node_that_is_passed_twice_are_saved(level, native, tmp_path):
    x = torch.linspace(-1, 1, 5, requires_grad=True)

    def run():
        y = x.tanh()
        y.sum().backward(retain_graph=True)
        (3 * y).sum().backward()

    step_data = recorded(tmp_path / "out", run, level=level, native=native, task="tensor")
    (call,) = [c for c in step_data.calls if c.name == "Tensor.tanh" and c.phase == "backward"]
    saved = load_file(tmp_path / "out/step0/rank0/tensors.safetensors")
    slope = 1 - torch.linspace(-1, 1, 5, dtype=torch.float64).tanh().square()
    assert len({value.tensor for value in (*call.args, *call.out)}) == 4
    assert [saved[value.tensor].tolist() for value in call.args] == [[1.0] * 5, [3.0] * 5]
    for value, expected in zip(call.out, (slope, 3 * slope), strict=True):
        torch.testing.assert_close(saved[value.tensor].double(), expected, rtol=1e-6, atol=1e-7)
