"""The audit of MindSpore trainings: silent where they are healthy, and right about what is planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from tests.mindspore.tiny import BATCH, GRAPH, PYNATIVE, Data, Loss, Net, train
from trainprobe.engine.core.records import Finding
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.integrations.mindspore_limits import NOT_JUDGED_IN_A_GRAPH, not_judged
from trainprobe.watching import watch

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamWeightDecay": lambda net: nn.AdamWeightDecay(net.trainable_params(), 1e-2),
    "Adam": lambda net: nn.Adam(net.trainable_params(), 1e-2),
    "Momentum": lambda net: nn.Momentum(net.trainable_params(), 1e-2, 0.9),
    "groups": lambda net: nn.AdamWeightDecay(
        [{"params": net.trainable_params()[:3], "lr": 0.02}, {"params": net.trainable_params()[3:]}], 1e-2
    ),
    "schedule": lambda net: nn.SGD(net.trainable_params(), [0.04, 0.03, 0.02, 0.01]),
}


def audited(output: Path, mode: int = PYNATIVE, extra: tuple[Any, ...] = (), **how: Any) -> tuple[Any, list[Finding]]:
    """Train with every relation at every step; `audit` in how: more of the plan's section."""
    section = {"every": 1, **how.pop("audit", {})}
    plan = {"output": str(output), "level": "off", "audit": section, "sinks": ["jsonl"], "on_error": "raise"}
    callback = ProbeCallback(plan)
    on = train(mode, [*extra, callback], **how)
    return on, callback.findings


def grave(findings: list[Finding]) -> list[tuple[str, int | None, str | None]]:
    return [(f.rule, f.step, f.site.name if f.site else None) for f in findings if f.severity != "info"]


@pytest.mark.proves("MindSpore", "the audit")
@pytest.mark.parametrize(
    ("mode", "optimizer"), [*((PYNATIVE, name) for name in OPTIMIZERS), (GRAPH, "AdamWeightDecay"), (GRAPH, "schedule")]
)
def test_a_healthy_training_is_quiet_and_keeps_its_bits(mode: int, optimizer: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[optimizer]
    bare = train(mode, make_optimizer=make)
    before = nn.Cell.__call__
    on, findings = audited(tmp_path / "out", mode, make_optimizer=make)
    assert grave(findings) == []
    assert on.bits == bare.bits
    assert nn.Cell.__call__ is before


def test_an_optimizer_that_leaves_a_weight_whose_gradient_has_turned_is_in_order(tmp_path: Path) -> None:
    ms.set_context(mode=PYNATIVE)
    net = nn.Dense(1, 1, has_bias=False)
    optimizer = nn.Rprop(net.trainable_params(), 0.3)
    gradients = ms.value_and_grad(lambda x: ops.square(net(x) - 0.2).mean(), None, optimizer.parameters)
    rested = 0
    with watch(net, optimizer, output=str(tmp_path / "out"), level="off", audit={"every": 1}, on_error="raise") as probe:
        for _ in range(10):
            before = net.weight.asnumpy().copy()
            with probe.step():
                loss, given = gradients(ms.Tensor(np.ones((4, 1), np.float32)))
                optimizer(given)
                probe.note("loss", loss)
            rested += np.array_equal(before, net.weight.asnumpy()) and bool(given[0].asnumpy().any())
    assert rested >= 2
    assert grave(probe.findings) == []


@pytest.mark.parametrize(("mode", "unjudged"), [(PYNATIVE, {*not_judged()}), (GRAPH, {*not_judged(), *NOT_JUDGED_IN_A_GRAPH})])
def test_each_relation_that_cannot_be_judged_says_so_once(mode: int, unjudged: set[str], tmp_path: Path) -> None:
    _, findings = audited(tmp_path / "out", mode, audit={"relations": {"clipping": 0}})
    told = [f.rule for f in findings if "is not judged under MindSpore" in f.message]
    assert sorted(told) == sorted(unjudged - {"clipping"})


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_a_parameter_that_no_optimizer_owns_is_named(mode: int, tmp_path: Path) -> None:
    def all_but_one(net: Any) -> Any:
        return nn.AdamWeightDecay([p for p in net.trainable_params() if p.name != "blocks.1.up.weight"], 1e-2)

    _, findings = audited(tmp_path / "out", mode, make_optimizer=all_but_one)
    assert grave(findings) == [("ownership", 1, "blocks.1.up.weight")]
    assert "owns 14 of 15" in next(f for f in findings if f.rule == "ownership").message


class Sgd(nn.Optimizer):
    """p ← p - lr·g for every parameter but one, and a count of steps that moves by `counts`."""

    def __init__(self, net: Any, skips: str = "", counts: int = 1) -> None:
        super().__init__(0.1, net.trainable_params())
        self.skips = skips
        self.global_step_increase_tensor = ms.Tensor([counts], ms.int32)

    def construct(self, gradients: Any) -> Any:
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        for p, g in zip(self.parameters, gradients, strict=True):
            if p.name != self.skips:
                ops.assign(p, p - self.learning_rate * g)
        return True


def test_a_parameter_that_does_not_move_is_named(tmp_path: Path) -> None:
    _, findings = audited(tmp_path / "out", make_optimizer=lambda net: Sgd(net, skips="head.weight"))
    assert grave(findings) == [("movement", 1, "head.weight")]


def test_a_count_of_steps_that_moves_by_two_is_found(tmp_path: Path) -> None:
    _, findings = audited(tmp_path / "out", make_optimizer=lambda net: Sgd(net, counts=2))
    assert [rule for rule, *_ in grave(findings)] == ["step_counters"]
    assert "went from 0 to 2" in next(f for f in findings if f.rule == "step_counters").message


class Between(Callback):
    """Does something to the training before step 3; `step_begin` of other callbacks comes after its own."""

    def __init__(self, does: Callable[[Any], None]) -> None:
        self.does = does

    def on_train_step_begin(self, run_context: Any) -> None:
        p = run_context.original_args()
        if p.cur_step_num == 3:
            self.does(p.train_network)


def write(tensor: Any, array: np.ndarray) -> None:
    """Write to a parameter in place: in PyNative mode `set_data` cuts it off from an optimizer that is compiled (below)."""
    if ms.get_context("mode") == PYNATIVE:
        ops.assign(tensor, ms.Tensor(array))
    else:
        tensor.set_data(ms.Tensor(array))


def halve_the_rate(cell: Any) -> None:
    write(cell.optimizer.learning_rate, np.array(0.005, np.float32))


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_a_rate_that_leaves_what_the_plan_declares_is_found(mode: int, tmp_path: Path) -> None:
    declared = {"schedule": lambda step: 0.01}
    assert grave(audited(tmp_path / "healthy", mode, audit=declared)[1]) == []
    _, findings = audited(tmp_path / "out", mode, (Between(halve_the_rate),), audit=declared)
    assert grave(findings) == [("learning_rate", 3, "lr")]
    assert findings[-1].measured == pytest.approx(0.005)


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
@pytest.mark.parametrize("what", ["value", "exp_avg"])
def test_a_write_between_two_updates_is_named(mode: int, what: str, tmp_path: Path) -> None:
    def disturb(cell: Any) -> None:
        i = next(i for i, p in enumerate(cell.optimizer.parameters) if p.name == "blocks.0.down.bias")
        tensor = (cell.optimizer.parameters if what == "value" else cell.optimizer.moments1)[i]
        changed = tensor.asnumpy().copy()
        changed[1] += 1e-3
        write(tensor, changed)

    _, findings = audited(tmp_path / "out", mode, (Between(disturb),))
    assert grave(findings) == [("untouched_between_steps", 3, "blocks.0.down.bias")]
    assert next(f for f in findings if f.step == 3).site.slot == what  # pyright: ignore[reportOptionalMemberAccess]


def test_a_parameter_that_set_data_cuts_off_from_its_optimizer_is_named(tmp_path: Path) -> None:
    """MindSpore 2.9 in PyNative mode: a compiled optimizer goes on with the storage that a parameter had before `set_data`."""
    held: list[bytes] = []

    def replace(cell: Any) -> None:
        weight = next(p for p in cell.optimizer.parameters if p.name == "blocks.0.down.bias")
        weight.set_data(ms.Tensor(weight.asnumpy().copy()))
        held.append(weight.asnumpy().tobytes())

    on, findings = audited(tmp_path / "out", PYNATIVE, (Between(replace),))
    stuck = on.weights["blocks.0.down.bias"] == held[0]
    assert grave(findings) == ([("movement", 3, "blocks.0.down.bias")] if stuck else [])


class Reports(nn.TrainOneStepWithLossScaleCell):
    """Reports like MindFormers: loss, overflow, loss scale, learning rate, norm; `wrong` is reported twice as large."""

    def __init__(self, network: Any, optimizer: Any, wrong: str = "") -> None:
        super().__init__(network, optimizer, ms.Tensor(1.0, ms.float32))
        self.wrong = wrong
        self.differentiate = ms.value_and_grad(network, None, optimizer.parameters)

    def construct(self, *inputs: Any) -> Any:
        loss, gradients = self.differentiate(*inputs)
        squares = sum(float((g.asnumpy().astype(np.float64) ** 2).sum()) for g in gradients)
        told = {"loss": loss, "lr": self.optimizer.learning_rate.copy(), "norm": ms.Tensor(squares**0.5, ms.float32)}
        if self.wrong == "hidden":
            told["loss"] = ms.Tensor(1.0, ms.float32)
        elif self.wrong:
            told[self.wrong] = told[self.wrong] * 2
        self.optimizer(gradients)
        return told["loss"], ms.Tensor(False), self.scale_sense, told["lr"], told["norm"]


@pytest.mark.parametrize(
    ("wrong", "found"), [("", []), ("lr", [("learning_rate", 1, "lr")]), ("norm", [("gradient_norm", 2, "grad_norm")])]
)
def test_what_is_reported_is_held_against_what_is_used(wrong: str, found: list[Any], tmp_path: Path) -> None:
    _, findings = audited(tmp_path / "out", around=lambda network, optimizer: Reports(network, optimizer, wrong))
    assert grave(findings) == found


def test_a_finite_loss_with_gradients_that_are_not_is_found(tmp_path: Path) -> None:
    def poison(cell: Any) -> None:
        weight = next(p for p in cell.optimizer.parameters if p.name == "blocks.1.up.weight")
        weight.set_data(ms.Tensor(np.full(weight.shape, np.nan, np.float32)))

    relations = {"untouched_between_steps": 0}
    wraps = {"around": lambda network, optimizer: Reports(network, optimizer, "hidden"), "audit": {"relations": relations}}
    _, findings = audited(tmp_path / "out", PYNATIVE, (Between(poison),), **wraps)
    assert grave(findings)[0][:2] == ("finite_together", 3)


def test_moments_that_do_not_follow_from_the_gradient_are_named(tmp_path: Path) -> None:
    class AdamWeightDecay(nn.AdamWeightDecay):
        def construct(self, gradients: Any) -> Any:
            out = super().construct(gradients)
            ops.assign(self.moments2[4], self.moments2[4] * 1.01)
            return out

    def make(net: Any) -> Any:
        return AdamWeightDecay(net.trainable_params(), 1e-2)

    on, findings = audited(tmp_path / "out", make_optimizer=make)
    name = on.optimizer.parameters[4].name
    assert grave(findings) == [("moment_recurrence", 1, name)]


class Stubborn(nn.Dropout):
    """A dropout that does not leave training mode."""

    def add_flags(self, **flags: Any) -> Any:
        return super().add_flags(**({**flags, "training": True} if "training" in flags else flags))


@pytest.mark.parametrize(("drop", "found"), [(nn.Dropout, []), (Stubborn, [("evaluation", "drop")])])
def test_an_evaluation_that_goes_on_training_is_found(drop: Any, found: list[Any], tmp_path: Path) -> None:
    ms.set_context(mode=PYNATIVE)
    ms.set_seed(1)
    net = Net()
    net.drop = drop(p=0.2)
    model = Model(net, Loss(), nn.AdamWeightDecay(net.trainable_params(), 1e-2), metrics={"loss"})
    data, other = (GeneratorDataset(Data(seed=s), ["x", "y"], shuffle=False).batch(BATCH) for s in (1, 2))
    plan = {"output": str(tmp_path / "out"), "level": "off", "audit": {"every": 1}, "on_error": "raise"}
    callback = ProbeCallback(plan)
    model.fit(2, data, other, callbacks=[callback], dataset_sink_mode=False, valid_dataset_sink_mode=False)
    told = dict.fromkeys((f.rule, f.site.name if f.site else None) for f in callback.findings if f.severity != "info")
    assert list(told) == found
