"""Loops that are written out, as people write them: a cell that trains, a whole step that is compiled, several models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from trainprobe.engine.core.records import Record
from trainprobe.watching import watch

PYNATIVE, GRAPH = ms.PYNATIVE_MODE, ms.GRAPH_MODE
MONITOR = {"optimizer_state": True, "update": True}


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Dense(3, 4), nn.Tanh(), nn.Dense(4, 2)

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Around(nn.Cell):
    """A cell of a program's own around a model: MindSpore renames the parameters, `up.weight` is `net.up.weight` then."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.loss = net, nn.MSELoss()

    def construct(self, x: Any, y: Any) -> Any:
        return self.loss(self.net(x), y)


class Watched:
    """What a loop left: the records of each collected step, and what the parameters were before and after each."""

    def __init__(self) -> None:
        self.steps: list[list[Record]] = []
        self.values: list[dict[str, np.ndarray]] = []
        self.findings: list[Any] = []

    def slot(self, step: int, slot: str) -> dict[str, Record]:
        return {r.site.name: r for r in self.steps[step] if r.site.kind == "parameter" and r.site.slot == slot}

    def check(self, step: int, slot: str, want: dict[str, np.ndarray]) -> None:
        have = self.slot(step, slot)
        assert {*have} == {*want}
        for name, array in want.items():
            assert have[name].values["norm"] == pytest.approx(float(np.linalg.norm(array.astype(np.float64))), rel=1e-6), name
            assert have[name].values["max"] == array.max(), name

    def check_update(self, step: int) -> None:
        before, after = self.values[step : step + 2]
        self.check(step, "value", before)
        self.check(step, "value_after", after)
        self.check(step, "update", {name: after[name] - before[name] for name in after})


def batch(i: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(i)
    return ms.Tensor(draw.normal(size=(5, 3)).astype(np.float32)), ms.Tensor(draw.normal(size=(5, 2)).astype(np.float32))


def values_of(net: Any) -> dict[str, np.ndarray]:
    return {p.name: p.asnumpy().copy() for p in net.get_parameters()}


@pytest.fixture(autouse=True)
def _pynative() -> Iterator[None]:
    yield
    ms.set_context(mode=PYNATIVE)


def new(mode: int, make_optimizer: Callable[[Any], Any] = lambda parameters: nn.Momentum(parameters, 0.1, 0.9)) -> Any:
    ms.set_context(mode=mode)
    ms.set_seed(3)
    net = Net()
    net.set_train()
    return net, make_optimizer(net.trainable_params())


@contextmanager
def watched(model: Any, optimizer: Any, output: Path, **plan: Any) -> Iterator[tuple[Any, Watched]]:
    found = Watched()
    whole = {"level": "off", "monitor": MONITOR, "audit": {"every": 1}, "on_error": "raise", **plan}
    with watch(model, optimizer, output=str(output), **whole) as probe:
        ends = probe.end_step

        def end_step(**how: Any) -> Any:
            step_data = ends(**how)
            found.steps.append([] if step_data is None else list(step_data.records()))
            return step_data

        probe.end_step = end_step
        yield probe, found
    found.findings = probe.findings


def loop(probe: Any, found: Watched, net: Any, step: Callable[[Any, Any], Any], steps: int = 3) -> list[bytes]:
    found.values.append(values_of(net))
    for i in range(steps):
        with probe.step():
            probe.note("loss", step(*batch(i)))
        found.values.append(values_of(net))
    return [array.tobytes() for array in found.values[-1].values()]


def whole_step(net: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    gradients = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)

    @ms.jit
    def step(x: Any, y: Any) -> Any:
        loss, given = gradients(x, y)
        optimizer(given)
        return loss

    return step


def training_cell(net: Any, optimizer: Any) -> Any:
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    return cell.set_train()


COMPILED_STEPS = {"a cell that trains, in a graph": (GRAPH, training_cell), "a step under jit": (PYNATIVE, whole_step)}


@pytest.mark.parametrize("name", COMPILED_STEPS)
@pytest.mark.parametrize("level", ["off", "L0"])
def test_parameters_and_state_around_an_update_inside_a_graph_are_recorded(name: str, level: str, tmp_path: Path) -> None:
    mode, make = COMPILED_STEPS[name]
    bits = []
    for look in (False, True):
        net, optimizer = new(mode)
        step = make(net, optimizer)
        if not look:
            for i in range(3):
                step(*batch(i))
            bits.append([p.asnumpy().tobytes() for p in net.get_parameters()])
            continue
        with watched(net, optimizer, tmp_path / "out", level=level) as (probe, found):
            bits.append(loop(probe, found, net, step))
    assert bits[0] == bits[1]
    for i in range(3):
        found.check_update(i)
        assert {*found.slot(i, "momentum_buffer_after")} == {p.name for p in net.get_parameters()}
    assert [f.message for f in found.findings if f.severity != "info"] == []


def test_a_step_without_an_update_shows_none(tmp_path: Path) -> None:
    net, optimizer = new(GRAPH)
    gradients = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)
    with watched(net, optimizer, tmp_path / "out") as (probe, found):
        for i in range(4):
            with probe.step():
                loss, given = gradients(*batch(i))
                probe.note("loss", loss)
                if i % 2:
                    optimizer(given)
            if i % 2:
                found.check(i, "grad", {p.name: g.asnumpy() for p, g in zip(optimizer.parameters, given, strict=True)})
    shown = [bool(found.slot(i, "update")) for i in range(4)]
    assert shown == [False, True, False, True]
    assert [f.message for f in found.findings if f.severity != "info"] == []


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_of_a_step_that_only_adds_gradients_up_nobody_says_that_nothing_was_seen(mode: int, tmp_path: Path) -> None:
    net, optimizer = new(mode)
    gradients = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)
    with watched(net, optimizer, tmp_path / "out") as (probe, found):
        summed = None
        for i in range(4):
            with probe.step():
                given = gradients(*batch(i))[1]
                if i % 2:
                    optimizer(tuple(a + b for a, b in zip(given, summed, strict=True)))
                summed = given
    assert [len(found.slot(i, "update")) for i in range(4)] == [0, 4, 0, 4]
    assert [f.message for f in found.findings if f.severity != "info"] == []


class Average(nn.Cell):
    """A moving average of weights, in the manner of mindone: it holds the weights and copies of them."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.weights = ms.ParameterTuple(net.trainable_params())
        self.averages = self.weights.clone(prefix="ema", init="same")

    def construct(self) -> None:
        for i in range(len(self.weights)):
            ops.assign(self.averages[i], self.averages[i] * 0.9 + self.weights[i] * 0.1)


class TrainsAndAverages(nn.TrainOneStepCell):
    def __init__(self, network: Any, optimizer: Any, average: Any) -> None:
        super().__init__(network, optimizer)
        self.average = average

    def construct(self, x: Any, y: Any) -> Any:
        loss, given = ms.value_and_grad(self.network, None, self.weights)(x, y)
        loss = ops.depend(loss, self.optimizer(given))
        return ops.depend(loss, self.average())


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_a_moving_average_that_the_cell_that_trains_holds_is_no_part_of_the_model(mode: int, tmp_path: Path) -> None:
    net, optimizer = new(mode)
    cell = TrainsAndAverages(nn.WithLossCell(net, nn.MSELoss()), optimizer, Average(net))
    assert all(p.requires_grad for p in cell.average.averages)
    with watched(cell, None, tmp_path / "out") as (probe, found):
        loop(probe, found, net, cell.set_train())
    assert not np.array_equal(cell.average.averages[0].asnumpy(), net.up.weight.asnumpy())
    assert [f.message for f in found.findings if f.severity != "info"] == []
    for i in range(3):
        found.check_update(i)


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
@pytest.mark.parametrize("told", [True, False], ids=["optimizer told", "optimizer inside"])
def test_of_a_cell_that_trains_the_optimizer_is_no_part_of_the_model(mode: int, told: bool, tmp_path: Path) -> None:
    net, optimizer = new(mode, lambda parameters: nn.AdamWeightDecay(parameters, 1e-2))
    cell = training_cell(net, optimizer)
    with watched(cell, optimizer if told else None, tmp_path / "out", level="L0") as (probe, found):
        loop(probe, found, net, cell)
    assert [f.message for f in found.findings if f.severity != "info"] == []
    for i in range(3):
        found.check_update(i)
        assert {*found.slot(i, "exp_avg")} == {p.name for p in net.get_parameters()}
    entries = json.loads((tmp_path / "out/step0/rank0/dump.json").read_text())["data"]
    of_weights = [name for name in entries if "parameters_grad" in name]
    assert of_weights == ([f"Cell.network._backbone.{at}.Dense.parameters_grad.0" for at in ("down", "up")] if mode else [])


@pytest.mark.parametrize("kind", [nn.AdamWeightDecay, nn.Adam, nn.Momentum])
def test_state_of_parameters_that_a_cell_around_the_model_renamed_is_recorded(kind: Any, tmp_path: Path) -> None:
    settings = (0.1, 0.9) if kind is nn.Momentum else (1e-2,)
    net, optimizer = new(PYNATIVE, lambda parameters: kind(parameters, *settings))
    around = Around(net)  # after the optimizer
    names = {p.name for p in net.get_parameters()}
    assert names == {f"net.{part}.{which}" for part in ("up", "down") for which in ("weight", "bias")}
    gradients = ms.value_and_grad(around, None, optimizer.parameters)
    with watched(net, optimizer, tmp_path / "out") as (probe, found):

        def step(x: Any, y: Any) -> Any:
            loss, given = gradients(x, y)
            optimizer(given)
            return loss

        loop(probe, found, net, step, 1)
    members = {"momentum_buffer": "moments"} if kind is nn.Momentum else {"exp_avg": "moments1", "exp_avg_sq": "moments2"}
    if kind is nn.Adam:
        members = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
    for slot, held in members.items():
        states = getattr(optimizer, held)
        want = {p.name: state.asnumpy() for p, state in zip(optimizer.parameters, states, strict=True)}
        found.check(0, f"{slot}_after", want)


def test_models_whose_parameters_have_the_same_names_are_told_apart(tmp_path: Path) -> None:
    ms.set_context(mode=PYNATIVE)
    ms.set_seed(1)
    maker, judge = nn.Dense(3, 3), nn.Dense(3, 1)
    optimizers = [nn.Adam(maker.trainable_params(), 1e-2), nn.SGD(judge.trainable_params(), 1e-2, momentum=0.9)]
    losses = (lambda x: -judge(maker(x)).mean(), lambda x: ops.square(judge(maker(x)) - judge(x)).mean())
    graded = [ms.value_and_grad(f, None, o.parameters) for f, o in zip(losses, optimizers, strict=True)]
    with watched([maker, judge], optimizers, tmp_path / "out", level="L0") as (probe, found), probe.step():
        x = batch(0)[0]
        want = {}
        for i in (1, 0):
            loss, given = graded[i](x)
            want |= {f"{i}.{p.name}": g.asnumpy() for p, g in zip(optimizers[i].parameters, given, strict=True)}
            optimizers[i](given)
        probe.note("loss", loss)
    assert {*want} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    by_monitor = {r.site.name: r for r in found.steps[0] if r.site.slot == "grad" and r.site.kind == "parameter"}
    for name, array in want.items():
        assert by_monitor[name].values["norm"] == pytest.approx(float(np.linalg.norm(array)), rel=1e-6, abs=1e-12), name
    assert {*found.slot(0, "value_after")} == {*want}
    assert ({*found.slot(0, "exp_avg")}, {*found.slot(0, "momentum_buffer")}) == (
        {"0.weight", "0.bias"},
        {"1.weight", "1.bias"},
    )
    entries = json.loads((tmp_path / "out/step0/rank0/dump.json").read_text())["data"]
    forward = [name for name in entries if ".forward." in name]
    of_maker, of_judge = (sum(f"Cell.{i}.Dense" in name for name in forward) for i in (0, 1))
    assert (of_maker, of_judge) == (2, 3)
