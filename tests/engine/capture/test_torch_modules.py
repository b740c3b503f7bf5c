"""Calls of modules in unusual circumstances: what is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import trainprobe
from trainprobe.engine.core.records import Call, StepData


def recorded(model: torch.nn.Module, train: Any, folder: Any, **plan: Any) -> StepData:
    with trainprobe.watch(model, output=folder, level="L0", sinks=["memory"], **plan) as probe:
        probe.begin_step()
        train()
        step_data = probe.end_step()
        assert step_data is not None
        assert not probe.findings
        return step_data


def calls_of(step_data: StepData, name: str) -> list[Call]:
    return [call for call in step_data.calls if call.kind == "module" and call.name == name]


class Quiet(torch.nn.Module):
    """Leaves gradients switched off behind what it has computed."""

    def forward(self, x):
        doubled = x * 2
        torch.set_grad_enabled(False)
        return doubled


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quiet = Quiet()
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x):
        h = self.quiet(x)
        torch.set_grad_enabled(True)
        return self.head(h)


def test_a_module_that_switches_gradients_off_behind_its_result_has_the_gradient_there(tmp_path):
    torch.manual_seed(0)
    model = Whole()
    x = torch.randn(2, 3, requires_grad=True)
    step_data = recorded(model, lambda: model(x).sum().backward(), tmp_path / "out")
    back = next(call for call in calls_of(step_data, "quiet") if call.phase == "backward")
    largest = step_data.numbers()["max"]
    expected = model.head.weight.detach().max().item()
    assert largest[back.args[0].row] == expected
    assert largest[back.out[0].row] == 2 * expected


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.bias = torch.nn.Parameter(torch.tensor([1.0, 1.0]))

    def forward(self, x, whole):
        return x * self.weight + self.bias if whole else x * self.weight


def test_gradients_of_a_module_stand_together_by_their_number_and_not_by_when_they_came(tmp_path):
    model = Affine()
    x = torch.tensor([5.0, 7.0])

    def train():
        for factor, whole in ((1.0, False), (10.0, False), (100.0, True), (1000.0, True)):
            (model(x, whole).sum() * factor).backward()

    step_data = recorded(model, train, tmp_path / "out")
    found = [call for call in step_data.calls if call.kind == "parameter"]
    largest = step_data.numbers()["max"]
    told = {call.call: {name: largest[value.row] for name, value in call.params.items()} for call in found}
    assert len(told) == len(found) == 4
    assert {n: told[n]["weight"] for n in range(4)} == {0: 7.0, 1: 70.0, 2: 700.0, 3: 7000.0}
    assert {n: told[n]["bias"] for n in (0, 1)} == {0: 100.0, 1: 1000.0}
    assert all(set(told[n]) == {"weight"} for n in (2, 3))


def test_a_model_that_is_exported_within_a_step_is_recorded_as_if_it_were_not(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    x = torch.randn(2, 3)

    def train():
        model(x)
        torch.export.export(model, (x,), strict=False)
        model(x)

    step_data = recorded(model, train, tmp_path / "out")
    first = calls_of(step_data, "0")
    assert [(call.phase, call.call) for call in first] == [("forward", 0), ("forward", 1)]
    assert [value.note for call in first for value in call.args] == [None, None]


@pytest.mark.parametrize("native", [True, False])
def test_a_module_that_is_called_with_other_parameters_has_those_in_that_call_and_its_own_before_and_after(native, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    own = model[0].weight.detach().clone()
    x = torch.randn(2, 3)

    def train():
        model(x)
        with pytest.raises(RuntimeError):
            torch.func.functional_call(model, {"0.weight": own * 3}, (x.T,))
        torch.func.functional_call(model, {"0.weight": own * 2}, (x,)).sum().backward()
        model(x)

    step_data = recorded(model, train, tmp_path / "out", native=native)
    norms = step_data.numbers()["norm"]
    found = [norms[call.params["weight"].row] for call in calls_of(step_data, "0") if call.phase == "forward"]
    assert found == pytest.approx([float(own.double().norm()) * factor for factor in (1, 3, 2, 1)])


@pytest.mark.parametrize("native", [True, False])
def test_a_part_that_torchscript_compiled_is_seen_as_any_other(native, tmp_path):
    torch.manual_seed(0)
    part = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.jit.script(part))
    x = torch.randn(2, 3)
    expected = part(model[0](x)).double()
    step_data = recorded(model, lambda: model(x).sum().backward(), tmp_path / "out", native=native)
    forward, backward = calls_of(step_data, "1")
    numbers = step_data.numbers()
    assert numbers["mean"][forward.out.row] == pytest.approx(float(expected.mean()), rel=1e-6)
    assert numbers["mean"][backward.args[0].row] == 1.0


def test_each_of_several_chunks_is_recorded_under_its_number(tmp_path):
    chunks = [torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 1))]
    with trainprobe.watch(chunks, level="L0", output=tmp_path, console=False) as probe, probe.step():
        chunks[1](chunks[0](torch.ones(2, 3))).sum().backward()
    names = json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]
    forward = [name for name in names if name.endswith("forward.0")]
    assert forward == ["Module.0.Linear.forward.0", "Module.1.Sequential.forward.0", "Module.1.0.Linear.forward.0"]
