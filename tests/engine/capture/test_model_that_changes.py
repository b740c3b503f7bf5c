"""A model that is made of something else in a later step: what is recorded is what ran, in consecutive steps too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import trainprobe
from tests import shown

STEPS = 4
CHANGED = 2


def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def parameter_replaced(model, optimizer):
    model[0].weight = torch.nn.Parameter(torch.full((3, 3), 7.0))
    optimizer.add_param_group({"params": [model[0].weight]})


def module_appended(model, optimizer):
    model.append(torch.nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[3].parameters())})


def module_replaced(model, optimizer):
    model[2] = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer.add_param_group({"params": list(model[2].parameters())})


def parameter_frozen(model, optimizer):
    model[0].weight.requires_grad_(False)


def parameter_trained(model, optimizer):
    model[2].bias.requires_grad_(True)


def bias_taken_away(model, optimizer):
    model[2].bias = None


def module_renamed(model, optimizer):
    model._modules["last"] = model._modules.pop("2")


CHANGES = [
    parameter_replaced,
    module_appended,
    module_replaced,
    parameter_frozen,
    parameter_trained,
    bias_taken_away,
    module_renamed,
]


def trained(change, **plan):
    """Return, for each step, name → (value before the update, gradient), as the model itself has them."""
    model, optimizer = small()
    model[2].bias.requires_grad_(change is not parameter_trained)
    told = []
    with trainprobe.watch(model, optimizer, **plan) as probe:
        for step in range(STEPS):
            if step == CHANGED:
                change(model, optimizer)
            with probe.step():
                optimizer.zero_grad()
                model(torch.ones(2, 3) + step).square().sum().backward()
                told.append(
                    {n: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}
                )
                optimizer.step()
    return told


def same(number, tensor):
    return number == pytest.approx(tensor.max().item(), rel=1e-6)


@pytest.mark.parametrize("change", CHANGES)
def test_the_dump_shows_the_modules_parameters_and_gradients_of_its_step(change, tmp_path):
    told = trained(change, output=tmp_path / "out", level="L0")
    for step in range(STEPS):
        data = shown.entries(tmp_path / "out", step)
        values = shown.forward_parameters(data, "Linear", "Module.")
        gradients = {
            f"{key.split('.Linear.')[0].removeprefix('Module.')}.{name}": leaf[0]["Max"]
            for key, entry in data.items()
            if ".parameters_grad." in key
            for name, leaf in entry.items()
        }
        assert set(values) == set(told[step])
        assert all(same(values[name], value) for name, (value, _) in told[step].items())
        arrived = {name: grad for name, (_, grad) in told[step].items() if grad is not None}
        assert set(gradients) == set(arrived)
        assert all(same(gradients[name], grad) for name, grad in arrived.items())


@pytest.mark.parametrize("change", CHANGES)
def test_the_monitor_shows_the_parameters_gradients_and_optimizer_state_of_its_step(change, tmp_path):
    monitor = {"parameters": True, "gradients": True, "optimizer_state": True}
    told = trained(change, output=tmp_path / "out", level="off", monitor=monitor)
    recorded = shown.states(tmp_path / "out")
    assert list(recorded) == list(range(STEPS))
    for step, states in recorded.items():
        assert set(told[step]) <= set(states)
        for name, (value, grad) in told[step].items():
            assert same(states[name]["value"], value)
            assert ("grad" in states[name]) == (grad is not None)
            assert grad is None or (same(states[name]["grad"], grad) and "exp_avg_after" in states[name])


def test_an_optimizer_that_replaces_another_is_the_one_whose_state_is_shown_and_the_other_is_let_go(tmp_path):
    model, optimizer = small()
    monitor = {"parameters": True, "gradients": True, "optimizer_state": True}
    told = []
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=monitor) as probe:
        for step in range(STEPS):
            if step == CHANGED:
                before = weakref.ref(optimizer)
                model[0].weight.requires_grad_(False)  # and left out, so that only the first optimizer held it
                optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
            with probe.step():
                optimizer.zero_grad()
                model(torch.ones(2, 3) + step).square().sum().backward()
                told.append({n: p.detach().clone() for n, p in model.named_parameters()})
                optimizer.step()
            moments = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters() if p in optimizer.state}
            told[-1] = told[-1], moments
        gc.collect()
        assert before() is None
    recorded = shown.states(tmp_path / "out")
    assert list(recorded) == list(range(STEPS))
    for step, states in recorded.items():
        values, moments = told[step]
        assert {n: s["value"] for n, s in states.items()} == {
            n: pytest.approx(v.max().item(), rel=1e-6) for n, v in values.items()
        }
        after = {n: s["exp_avg_after"] for n, s in states.items() if "exp_avg_after" in s}
        assert after == {n: pytest.approx(v.max().item(), rel=1e-6) for n, v in moments.items()}


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as SAM and Lookahead do, and has a state of its own."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()


def test_an_optimizer_that_wraps_the_one_that_was_opened_does_not_take_its_place(tmp_path):
    model, optimizer = small()
    monitor = {"optimizer_state": True}
    wrapper = Wrapper(optimizer)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=monitor) as probe:
        for _ in range(2):
            with probe.step():
                model(torch.ones(2, 3)).sum().backward()
                wrapper.step()
    *_, last = shown.states(tmp_path / "out").values()
    slots = {slot for seen in last.values() for slot in seen}
    assert {"exp_avg_after", "slow_after"} <= slots
