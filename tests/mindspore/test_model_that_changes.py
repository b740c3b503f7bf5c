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
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from tests.mindspore.tiny import PYNATIVE
from trainprobe.engine.dumps import read_log
from trainprobe.integrations.mindformers import ProbeCallback

STEPS, CHANGED = 4, 3  # of the steps 1 to 4, the third is the first of the changed model


@dataclass
class Told:
    """What there is of a parameter in a step: its name, and the largest element of each. moment: after the update."""

    name: str
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


class Trains(nn.TrainOneStepCell):
    """MindSpore's own cell, which tells for each step path of parameter → what there is of it."""

    def __init__(self, network: Any, optimizer: Any, net: Net) -> None:
        super().__init__(network, optimizer)
        self.net = (net,)  # in a tuple: no part of this cell
        self.told: list[dict[str, Told]] = []

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        grads = self.grad_no_sens(self.network, self.weights)(*inputs)
        told = {id(p): Told(str(p.name), largest(p)) for p in self.net[0].get_parameters()}
        self.told.append({path: told[id(p)] for path, p in self.net[0].parameters_and_names()})
        loss = ops.depend(loss, self.optimizer(grads))
        moments = self.optimizer.moments if isinstance(self.optimizer, nn.Momentum) else self.optimizer.moment1
        for p, grad, moment in zip(self.weights, grads, moments, strict=True):
            if id(p) in told:
                told[id(p)].grad, told[id(p)].moment = largest(grad), largest(moment)
        return loss

    def goes_on_with(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.weights = optimizer.parameters


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


def bias_taken_away(net: Net, train: Trains) -> None:
    net.up.bias, net.up.has_bias = None, False
    train.goes_on_with(adam(net))


def optimizer_replaced(net: Net, train: Trains) -> None:
    train.goes_on_with(adam(net))


def optimizer_of_another_kind(net: Net, train: Trains) -> None:
    train.goes_on_with(nn.Momentum(net.trainable_params(), 0.01, 0.9))


CHANGES: list[Callable[[Net, Trains], None]] = [
    parameter_replaced,
    parameter_replaced_behind_the_optimizer,
    cell_appended,
    cell_replaced,
    cell_taken_away,
    cell_called_otherwise,
    parameter_frozen,
    parameter_frozen_and_left_out,
    parameter_trained,
    bias_taken_away,
    optimizer_replaced,
    optimizer_of_another_kind,
]


class Changes(Callback):
    def __init__(self, change: Callable[[], None]) -> None:
        self.change = change

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == CHANGED:
            self.change()


def trained(change: Callable[[Net, Trains], None], **plan: Any) -> tuple[Trains, ProbeCallback]:
    ms.set_context(mode=PYNATIVE)
    ms.set_seed(3)
    net = Net()
    net.ends["down"].bias.requires_grad = change is not parameter_trained
    train = Trains(nn.WithLossCell(net, nn.MSELoss()), adam(net), net)
    x = np.arange(STEPS * 6, dtype=np.float32).reshape(STEPS * 2, 3) / 9
    data = GeneratorDataset(list(zip(x, x[:, :2], strict=True)), ["x", "y"], shuffle=False).batch(2)
    callback = ProbeCallback({"stacks": False, "on_error": "raise", **plan})
    before = [Changes(lambda: change(net, train)), callback]
    Model(train).train(1, data, callbacks=before, dataset_sink_mode=False)
    return train, callback


@pytest.mark.parametrize("change", CHANGES)
def test_the_dump_shows_the_cells_and_parameters_of_its_step(change: Callable[[Net, Trains], None], tmp_path: Path) -> None:
    train, _ = trained(change, output=str(tmp_path / "out"), level="L0")
    for step, told in enumerate(train.told, start=1):
        data = json.loads((tmp_path / "out" / f"step{step}" / "rank0" / "dump.json").read_text())["data"]
        values = {
            f"{key.split('.Dense.')[0].removeprefix('Cell.')}.{name}": leaf["Max"]
            for key, entry in data.items()
            if ".forward." in key
            for name, leaf in entry.get("parameters", {}).items()
        }
        assert values == pytest.approx({path: now.value for path, now in told.items()}, rel=1e-6)


@pytest.mark.parametrize("change", CHANGES)
def test_the_monitor_shows_the_parameters_gradients_and_optimizer_state_of_its_step(
    change: Callable[[Net, Trains], None], tmp_path: Path
) -> None:
    monitor = {"parameters": True, "gradients": True, "optimizer_state": True}
    train, _ = trained(change, output=str(tmp_path / "out"), level="off", monitor=monitor)
    reels = list(read_log(tmp_path / "out" / "rank0" / "records.jsonl"))
    assert [reel.step for reel in reels] == [1, 2, 3, 4]
    for reel in reels:
        told = train.told[reel.step - 1].values()
        numbers = reel.numbers()["max"]
        seen: dict[str, dict[str, float]] = {}
        for call in (c for c in reel.calls if c.kind == "state"):
            for slot, value in call.params.items():
                seen.setdefault(slot, {})[call.name] = numbers[value.row]
        moment = "momentum_buffer_after" if "momentum_buffer_after" in seen else "exp_avg_after"
        assert seen["value"] == pytest.approx({now.name: now.value for now in told}, rel=1e-6)
        assert seen["grad"] == pytest.approx({now.name: now.grad for now in told if now.grad is not None}, rel=1e-6)
        assert seen[moment] == pytest.approx({now.name: now.moment for now in told if now.moment is not None}, rel=1e-6)
        assert ("momentum_buffer_after" in seen) == (change is optimizer_of_another_kind and reel.step >= CHANGED)
        assert ("exp_avg_after" in seen) != ("momentum_buffer_after" in seen)
