"""A MindSpore model or optimizer that is another in a later step: what is recorded is what ran, in consecutive steps too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from tests import shown
from tests.mindspore.tiny import GRAPH, PYNATIVE
from trainprobe.integrations.mindformers import ProbeCallback

STEPS, CHANGED = 4, 3  # of the steps 1 to 4, the third is the first of the changed model


@dataclass
class Told:
    """What there is of a parameter in a step, the largest element of each. moment: of the optimizer, after the update."""

    name: str  # MindSpore's own, or its path where several have that
    value: float
    grad: float | None = None
    moment: float | None = None


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(3, 3)
        self.body = nn.SequentialCell(nn.Dense(3, 3), nn.Tanh())
        self.ends = nn.CellDict({"down": nn.Dense(3, 2)})

    def construct(self, x: Any) -> Any:
        x = self.body(self.up(x))
        for end in self.ends.values():
            x = end(x)
        return x


class Compiled(nn.TrainOneStepCell):
    """MindSpore's own cell."""

    def goes_on_with(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.weights = optimizer.parameters


class Trains(Compiled):
    """The same in PyNative mode, which tells for each step path of parameter → what there is of it."""

    def __init__(self, network: Any, optimizer: Any, net: Net) -> None:
        super().__init__(network, optimizer)
        self.net = (net,)  # in a tuple: no part of this cell
        self.told: list[dict[str, Told]] = []
        self.steps: Callable[[Any], Any] = lambda grads: self.optimizer(grads)
        self.moments: Callable[[], Any] = lambda: self.optimizer.moment1

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        grads = self.grad_no_sens(self.network, self.weights)(*inputs)
        names = [p.name for p in self.net[0].get_parameters()]
        there = [(path, p) for path, p in self.net[0].parameters_and_names()]
        told = {id(p): Told(path if names.count(p.name) > 1 else str(p.name), largest(p)) for path, p in there}
        self.told.append({path: told[id(p)] for path, p in there})
        self.steps(grads)
        for p, grad, moment in zip(self.weights, grads, self.moments(), strict=True):
            if id(p) in told:
                told[id(p)].grad, told[id(p)].moment = largest(grad), largest(moment)
        return loss


def largest(t: Any) -> float:
    return float(t.asnumpy().max())


def adam(net: Net) -> Any:
    return nn.Adam(net.trainable_params(), 0.1)


def parameter_replaced(net: Net, train: Trains) -> None:
    net.up.weight = ms.Parameter(np.full((3, 3), 7.0, np.float32), name="up.weight")
    train.goes_on_with(adam(net))


def parameter_replaced_behind_the_optimizer(net: Net, train: Trains) -> None:
    net.up.weight = ms.Parameter(np.full((3, 3), 7.0, np.float32), name="up.weight")


def cell_appended(net: Net, train: Trains) -> None:
    net.body.append(nn.Dense(3, 3))
    train.goes_on_with(adam(net))


def cell_appended_with_an_optimizer_of_its_own(net: Net, train: Trains) -> None:
    net.body.append(nn.Dense(3, 3))
    added = nn.Adam(net.body[2].trainable_params(), 0.1)
    first = train.optimizer
    train.weights = ms.ParameterTuple([*first.parameters, *added.parameters])
    train.steps = lambda grads: (first(grads[:-2]), added(grads[-2:]))
    train.moments = lambda: [*first.moment1, *added.moment1]


def cell_replaced(net: Net, train: Trains) -> None:
    net.body[0] = nn.SequentialCell(nn.Dense(3, 4), nn.Dense(4, 3))
    train.goes_on_with(adam(net))


def cell_taken_away(net: Net, train: Trains) -> None:
    del net.body[0]
    train.goes_on_with(adam(net))


def cell_called_otherwise(net: Net, train: Trains) -> None:
    net.ends["last"] = net.ends.pop("down")
    train.goes_on_with(adam(net))


def parameter_frozen(net: Net, train: Trains) -> None:
    net.up.weight.requires_grad = False


def parameter_frozen_and_left_out(net: Net, train: Trains) -> None:
    net.up.weight.requires_grad = False
    train.goes_on_with(adam(net))


def parameter_trained(net: Net, train: Trains) -> None:
    net.ends["down"].bias.requires_grad = True
    train.goes_on_with(adam(net))


def parameters_of_one_name(net: Net, train: Trains) -> None:
    """Two new parameters without names: MindSpore calls each by its attribute."""
    for cell, value in ((net.up, 7.0), (net.body[0], 5.0)):
        cell.weight = ms.Parameter(np.full((3, 3), value, np.float32), requires_grad=False)
    train.goes_on_with(adam(net))


def bias_taken_away(net: Net, train: Trains) -> None:
    net.up.bias, net.up.has_bias = None, False
    train.goes_on_with(adam(net))


def optimizer_replaced(net: Net, train: Trains) -> None:
    train.goes_on_with(adam(net))


def optimizer_of_another_kind(net: Net, train: Trains) -> None:
    train.goes_on_with(nn.Momentum(net.trainable_params(), 0.01, 0.9))
    train.moments = lambda: train.optimizer.moments


def another_model_is_stepped_too(net: Net, train: Trains) -> None:
    other = nn.Momentum(nn.Dense(3, 3).trainable_params(), 0.01, 0.9)
    ones = tuple(ms.Tensor(np.ones(p.shape, np.float32)) for p in other.parameters)
    train.steps = lambda grads: (other(ones), train.optimizer(grads))


CHANGES: list[Callable[[Net, Trains], None]] = [
    parameter_replaced,
    parameter_replaced_behind_the_optimizer,
    cell_appended,
    cell_appended_with_an_optimizer_of_its_own,
    cell_replaced,
    cell_taken_away,
    cell_called_otherwise,
    parameter_frozen,
    parameter_frozen_and_left_out,
    parameter_trained,
    parameters_of_one_name,
    bias_taken_away,
    optimizer_replaced,
    optimizer_of_another_kind,
    another_model_is_stepped_too,
]


class Changes(Callback):
    def __init__(self, change: Callable[[], None]) -> None:
        self.change = change

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == CHANGED:
            self.change()


def trained(change: Callable[[Net, Trains], None], **plan: Any) -> tuple[Trains, ProbeCallback]:
    net = new_net(PYNATIVE)
    net.ends["down"].bias.requires_grad = change is not parameter_trained
    train = Trains(nn.WithLossCell(net, nn.MSELoss()), adam(net), net)
    callback = ProbeCallback({"stacks": False, "on_error": "raise", **plan})
    run(train, Changes(lambda: change(net, train)), callback)
    return train, callback


def new_net(mode: int) -> Net:
    ms.set_context(mode=mode)
    ms.set_seed(3)
    return Net()


def run(train: Any, *callbacks: Any) -> None:
    x = np.arange(STEPS * 6, dtype=np.float32).reshape(STEPS * 2, 3) / 9
    data = GeneratorDataset(list(zip(x, x[:, :2], strict=True)), ["x", "y"], shuffle=False).batch(2)
    Model(train).train(1, data, callbacks=list(callbacks), dataset_sink_mode=False)


@pytest.mark.parametrize("change", CHANGES)
def test_the_dump_shows_the_cells_and_parameters_of_its_step(change: Callable[[Net, Trains], None], tmp_path: Path) -> None:
    train, _ = trained(change, output=str(tmp_path / "out"), level="L0")
    for step, told in enumerate(train.told, start=1):
        values = shown.forward_parameters(shown.entries(tmp_path / "out", step), "Dense", "Cell.")
        assert values == pytest.approx({path: now.value for path, now in told.items()}, rel=1e-6)


def monitored(output: Path) -> dict[int, dict[str, dict[str, float]]]:
    """Return step → slot → name → the largest element."""
    steps: dict[int, dict[str, dict[str, float]]] = {}
    for step, states in shown.states(output).items():
        seen = steps.setdefault(step, {})
        for name, slots in states.items():
            for slot, number in slots.items():
                seen.setdefault(slot, {})[name] = number
    assert list(steps) == [1, 2, 3, 4]
    return steps


@pytest.mark.parametrize("change", CHANGES)
def test_the_monitor_shows_the_parameters_gradients_and_optimizer_state_of_its_step(
    change: Callable[[Net, Trains], None], tmp_path: Path
) -> None:
    monitor = {"parameters": True, "gradients": True, "optimizer_state": True}
    train, _ = trained(change, output=str(tmp_path / "out"), level="off", monitor=monitor)
    for step, seen in monitored(tmp_path / "out").items():
        told = train.told[step - 1].values()
        moment = "momentum_buffer_after" if "momentum_buffer_after" in seen else "exp_avg_after"
        assert seen["value"] == pytest.approx({now.name: now.value for now in told}, rel=1e-6)
        assert seen["grad"] == pytest.approx({now.name: now.grad for now in told if now.grad is not None}, rel=1e-6)
        assert seen[moment] == pytest.approx({now.name: now.moment for now in told if now.moment is not None}, rel=1e-6)
        assert ("momentum_buffer_after" in seen) == (change is optimizer_of_another_kind and step >= CHANGED)
        assert ("exp_avg_after" in seen) != ("momentum_buffer_after" in seen)


class Held(Callback):
    """What the model and an optimizer hold: values before each step, and after it values and moments."""

    def __init__(self, net: Net, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer
        self.steps: list[dict[str, dict[str, float]]] = []

    def on_train_step_begin(self, run_context: Any) -> None:
        self.steps.append({"value": self.values()})

    def on_train_step_end(self, run_context: Any) -> None:
        moments = {p.name: largest(m) for p, m in zip(self.optimizer.parameters, self.optimizer.moment1, strict=True)}
        self.steps[-1] |= {"value_after": self.values(), "exp_avg_after": moments}

    def values(self) -> dict[str, float]:
        return {p.name: largest(p) for p in self.net.get_parameters()}


@pytest.mark.parametrize("change", [parameter_replaced, cell_replaced, optimizer_replaced, parameter_frozen])
def test_a_graph_goes_on_as_compiled_and_what_the_model_holds_is_shown(change: Callable[..., None], tmp_path: Path) -> None:
    """MindSpore does not compile anew: the first optimizer goes on with the first parameters, and new ones stand still."""
    net = new_net(GRAPH)
    train = Compiled(nn.WithLossCell(net, nn.MSELoss()), adam(net))
    held = Held(net, train.optimizer)
    monitor = {"parameters": True, "optimizer_state": True}
    plan = {"output": str(tmp_path / "out"), "level": "off", "monitor": monitor, "stacks": False, "on_error": "raise"}
    callback = ProbeCallback(plan)
    run(train, Changes(lambda: change(net, train)), held, callback)
    told = [(finding.rule, finding.step) for finding in callback.findings if finding.severity != "info"]
    assert told == ([] if change is parameter_frozen else [("mindspore", CHANGED)])
    moments = [step["exp_avg_after"]["up.bias"] for step in held.steps]
    assert len(set(moments)) == STEPS
    for step, seen in monitored(tmp_path / "out").items():
        told = held.steps[step - 1]
        if change is parameter_replaced and step >= CHANGED:
            del told["exp_avg_after"]["up.weight"]  # of the one that the model holds no more
        for slot, values in told.items():
            assert seen[slot] == pytest.approx(values, rel=1e-6)


def test_a_plan_selects_by_the_names_that_there_are_now(tmp_path: Path) -> None:
    trained(cell_appended, output=str(tmp_path / "out"), level="L0", parameters=["up.*", "body.*.weight"])
    seen: dict[int, list[str]] = {}
    for step in range(1, STEPS + 1):
        data = shown.entries(tmp_path / "out", step)
        seen[step] = sorted(f"{key.split('.Dense')[0]}.{name}" for key in data for name in data[key].get("parameters", {}))
    before = ["Cell.body.0.weight", "Cell.up.bias", "Cell.up.weight"]
    after = sorted([*before, "Cell.body.2.weight"])
    assert seen == {1: before, 2: before, 3: after, 4: after}


@pytest.mark.parametrize("way", [{}, {"use_reentrant": False, "early_stop": False}], ids=["reentrant", "hooks"])
def test_a_cell_that_is_recomputed_from_a_step_on_is_recorded_so(way: dict[str, bool], tmp_path: Path) -> None:
    trained(lambda net, train: net.body.recompute(**way), output=str(tmp_path / "out"), level="L0")
    for step in range(1, STEPS + 1):
        dump = json.loads((tmp_path / "out" / f"step{step}" / "rank0" / "dump.json").read_text())
        calls = [key for key in dump["data"] if ".Dense.forward." in key]  # what is recomputed is counted and not repeated
        assert calls == ["Cell.up.Dense.forward.0", "Cell.body.0.Dense.forward.0", "Cell.ends.down.Dense.forward.0"]
        assert dump["trainprobe"]["recomputed"] == (2 if step >= CHANGED else 0)


FOUND: dict[Callable[[Net, Trains], None], set[str]] = {
    parameter_replaced_behind_the_optimizer: {"ownership", "parameter_objects", "untouched_between_steps"},
    parameter_frozen: {"trainable_set"},
    cell_appended_with_an_optimizer_of_its_own: {"parameter_objects"},
    optimizer_replaced: {"untouched_between_steps", "step_counters"},
    another_model_is_stepped_too: set(),
}


@pytest.mark.parametrize("change", FOUND)
def test_the_audit_judges_the_model_and_the_optimizer_that_there_are(
    change: Callable[[Net, Trains], None], tmp_path: Path
) -> None:
    _, callback = trained(change, output=str(tmp_path / "out"), level="off", audit={"every": 1})
    grave = [finding for finding in callback.findings if finding.severity != "info"]
    assert {finding.rule for finding in grave} == FOUND[change]
    assert {finding.step for finding in grave} <= {CHANGED}
