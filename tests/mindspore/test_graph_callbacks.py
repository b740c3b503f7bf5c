"""`graph_callbacks`: cells, gradients and relations inside a compiled graph, and the bits of a training without them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model
from safetensors.numpy import load_file

from tests.mindspore.test_model import Keep, address
from tests.mindspore.tiny import BATCH, GRAPH, PYNATIVE, STEPS, Data, Loss, Net, Outcome, train
from trainprobe.engine.capture.mindspore.graph_cells import IN_A_GRAPH
from trainprobe.engine.core.naming import LEFT_OUT
from trainprobe.errors import PlanError
from trainprobe.integrations import mindspore_limits
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.integrations.mindspore_limits import NOT_JUDGED, NOT_JUDGED_IN_A_GRAPH
from trainprobe.integrations.mindspore_probe import MindSporeProbe
from trainprobe.watching import watch

FULL = {"level": "L0", "task": "tensor", "step": [2], "monitor": {"optimizer_state": True}, "audit": {"every": 1}}


def watched(output: Path, mode: int, **plan: Any) -> ProbeCallback:
    on = {"graph_callbacks": True} if mode == GRAPH else {}
    return ProbeCallback({"output": str(output), "on_error": "raise", "console": False, **on, **plan})


def dumped(output: Path, step: int = 2) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    folder = output / f"step{step}/rank0"
    tensors = load_file(folder / "tensors.safetensors")
    entries = json.loads((folder / "dump.json").read_text())["data"]
    return entries, {name: array for name, array in tensors.items() if not name.startswith("_padding")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train without a probe, in a graph with callbacks, and in PyNative mode."""
    folder = tmp_path_factory.mktemp("runs")
    callback = watched(folder / "graph", GRAPH, **FULL)
    other = watched(folder / "pynative", PYNATIVE, **FULL)
    seen, plain = Keep(callback), Keep(other)
    found: dict[str, Any] = {"folder": folder, "bare": train(GRAPH), "graph": train(GRAPH, [callback])}
    train(PYNATIVE, [other])
    return found | {"findings": callback.findings, "seen": seen.steps, "plain": plain.steps}


def test_no_bit_changes_and_no_callback_stays_in_a_cell(runs: dict[str, Any]) -> None:
    on: Outcome = runs["graph"]
    assert on.bits == runs["bare"].bits
    assert len(set(on.losses)) == STEPS
    assert not any("construct" in vars(cell) for cell in (*(c for _, c in on.net.cells_and_names()), on.optimizer))


def test_a_healthy_training_is_quiet_and_more_relations_are_judged(runs: dict[str, Any]) -> None:
    findings = runs["findings"]
    assert [f.message for f in findings if f.severity != "info"] == []
    unjudged = {f.rule for f in findings if "is not judged under MindSpore" in f.message}
    assert unjudged == {*NOT_JUDGED} and not unjudged & {*NOT_JUDGED_IN_A_GRAPH}
    assert [f.message for f in findings if f.rule == "mindspore"][:1] == [IN_A_GRAPH]


def test_the_dump_is_that_of_pynative_mode_to_the_bit(runs: dict[str, Any]) -> None:
    """But for gradients at inputs, which are left out."""
    (graph, inside), (plain, outside) = (dumped(runs["folder"] / name) for name in ("graph", "pynative"))
    assert {*graph} == {*plain}
    left_out = {name for name in outside if ".backward.0.output." in name}
    assert {*outside} - {*inside} == left_out and not {*inside} - {*outside}
    assert len(left_out) == 13
    assert [name for name in inside if inside[name].tobytes() != outside[name].tobytes()] == []
    trees = [json.loads((runs["folder"] / f"{name}/step2/rank0/construct.json").read_text()) for name in ("graph", "pynative")]
    assert trees[0] == trees[1]
    assert not (runs["folder"] / "graph/step1").exists()


def test_the_monitor_sees_the_same_gradients_and_state(runs: dict[str, Any]) -> None:
    graph, plain = ({(step, address(r)): r.values for step, rs in runs[name].items() for r in rs} for name in ("seen", "plain"))
    slots = Counter(slot for _, (_, slot, _) in plain)
    assert all(slots[slot] >= STEPS * 15 for slot in ("grad", "value", "exp_avg_after", "output")), slots
    assert {slot for _, (_, slot, _) in {*plain} - {*graph}} == {"grad_input.0"}
    apart = {
        where
        for where, values in plain.items()
        if where in graph
        and {name: graph[where][name] for name in values if name != "checksum"}
        != pytest.approx({name: value for name, value in values.items() if name != "checksum"}, rel=1e-12)
    }
    assert apart == set()


@pytest.mark.parametrize("way", ["recompute", "fused and sunk"])
def test_bits_stay_with_fused_kernels_recomputation_and_data_sinking(way: str, tmp_path: Path) -> None:
    def trained(callbacks: list[Any]) -> tuple[list[bytes], list[bytes]]:
        ms.set_context(mode=GRAPH)
        ms.set_seed(11)
        net, losses = Net(), []
        net.blocks = nn.SequentialCell(net.blocks[1])
        if way == "recompute":
            for block in net.blocks:
                block.recompute()
        optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)
        step = nn.TrainOneStepCell(nn.WithLossCell(net, Loss()), optimizer)
        if way == "fused and sunk":
            step.set_jit_config(ms.JitConfig(jit_level="O1"))

        class Losses(Callback):
            def on_train_step_end(self, run_context: Any) -> None:
                losses.append(run_context.original_args().net_outputs.asnumpy().tobytes())

        data = GeneratorDataset(Data(), ["x", "y"], shuffle=False).batch(BATCH)
        Model(step).train(1, data, [*callbacks, Losses()], dataset_sink_mode=way == "fused and sunk", sink_size=-1)
        return losses, [p.asnumpy().tobytes() for p in net.get_parameters()]

    callback = watched(tmp_path / "out", GRAPH, level="L0", task="tensor", step=[2])
    assert trained([callback]) == trained([])
    entries, tensors = dumped(tmp_path / "out")
    cells = {f"Cell.blocks.0.{name}.{phase}.0" for name in ("up.Dense", "act.GELU") for phase in ("forward", "backward")}
    assert cells <= {*entries}
    out = tensors["Cell.blocks.0.up.Dense.forward.0.output"]
    assert np.array_equal(out, tensors["Cell.blocks.0.act.GELU.forward.0.input.0"])


class Twice(nn.Cell):
    """Uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Dense(16, 16), nn.Dense(16, 16)

    def construct(self, x: Any) -> Any:
        return self.f(x) * self.g(x)


class Branches(nn.Cell):
    """Adds up branches in another order than it calls them in; the last uses the shared tensor more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Dense(16, 16)
        self.a, self.b, self.c, self.twice = nn.Dense(16, 16), nn.Dense(16, 16), nn.Dense(16, 16), Twice()
        self.normed = nn.SequentialCell(nn.Dense(16, 16), nn.BatchNorm1d(16))
        self.passed = nn.BatchNorm1d(16)

    def construct(self, x: Any) -> Any:
        h = self.start(x)
        passed, c = self.passed(h), self.c(h)
        y = self.normed(h) + self.b(h) + self.a(h) + passed + c + self.twice(h)
        return (y * y).mean()


class Gradients(nn.Cell):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.grad = net, ops.GradOperation(get_by_list=True)
        self.weights = ms.ParameterTuple(net.trainable_params())

    def construct(self, x: Any) -> Any:
        return self.grad(self.net, self.weights)(x)


@pytest.mark.parametrize("phases", [["forward"], ["forward", "backward"]], ids=len)
def test_the_order_in_which_gradients_of_one_tensor_are_added_stays(phases: list[str], tmp_path: Path) -> None:
    ms.set_context(mode=GRAPH)
    x = ms.Tensor(np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))

    def gradients(watch_it: bool) -> dict[str, bytes]:
        ms.set_seed(1)
        net = Branches().set_train()
        step = Gradients(net)
        if not watch_it:
            return {p.name: g.asnumpy().tobytes() for p, g in zip(step.weights, step(x), strict=True)}
        plan = {"output": str(tmp_path), "level": "L0", "graph_callbacks": True, "phases": phases, "on_error": "raise"}
        with watch(net, **plan) as probe, probe.step():
            found = step(x)
        assert len(json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]) == 12 * len(phases) - (
            len(phases) == 1
        )  # no one takes the result itself
        return {p.name: g.asnumpy().tobytes() for p, g in zip(step.weights, found, strict=True)}

    assert gradients(True) == gradients(False)


class Odd(nn.Cell):
    """Is handed and returns what is not one plain tensor, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def construct(self, x: Any, half: Any, scale: Any, on: bool, empty: Any, named: Any = None) -> Any:
        first = self.inner(x, scale)
        second = self.inner(first, scale)
        return second.sum() * named.sum() if on else x.sum(), half, 3, empty


class Inner(nn.Cell):
    def construct(self, x: Any, scale: Any) -> Any:
        return ops.relu(x * scale)


def test_scalars_halves_tuples_and_repeated_calls_are_recorded_and_what_is_not_is_said(tmp_path: Path) -> None:
    ms.set_context(mode=GRAPH)
    net = Odd()
    x, scale = ms.Tensor([[1.0, 2.0]], ms.float32), ms.Tensor(3.0, ms.float32)
    half, empty = ms.Tensor([0.5], ms.bfloat16), ms.Tensor(np.ones((0, 3), np.float32))

    def forward(x: Any, scale: Any) -> Any:
        return net(x, half, scale, True, empty, named=x)[0]

    def again(x: Any, scale: Any) -> Any:  # MindSpore keeps what it compiled of a function
        return net(x, half, scale, True, empty, named=x)[0]

    bare = ms.value_and_grad(again, (0, 1))(x, scale)
    plan = {"output": str(tmp_path / "out"), "level": "L0", "task": "tensor", "graph_callbacks": "all", "on_error": "raise"}
    with watch(net, **plan) as probe, probe.step():
        on = ms.value_and_grad(forward, (0, 1))(x, scale)
    assert [t.asnumpy().tobytes() for t in (bare[0], *bare[1])] == [t.asnumpy().tobytes() for t in (on[0], *on[1])]
    entries, tensors = dumped(tmp_path / "out", 0)
    forward = entries["Cell.root.Odd.forward.0"]
    assert [leaf and leaf["dtype"] for leaf in forward["input_args"]] == ["Float32", "BFloat16", "Float32"]
    assert tensors["Cell.root.Odd.forward.0.input.2"].tolist() == 3.0
    assert tensors["Cell.inner.Inner.forward.0.output"].tolist() == [[3.0, 6.0]]
    assert tensors["Cell.inner.Inner.forward.1.output"].tolist() == [[9.0, 18.0]]
    assert tensors["Cell.inner.Inner.backward.1.input.0"].tolist() == [[3.0, 3.0]]  # of the second call, which comes first
    assert tensors["Cell.inner.Inner.backward.0.input.0"].tolist() == [[9.0, 9.0]]
    assert any("keyword arguments of cells" in finding.message for finding in probe.findings)


class AdamWeightDecay(nn.AdamWeightDecay):
    def construct(self, gradients: Any) -> Any:
        out = super().construct(gradients)
        return ops.depend(out, ops.assign(self.moments2[4], self.moments2[4] * 1.01))


def test_moments_that_do_not_follow_from_the_gradient_are_named(tmp_path: Path) -> None:
    callback = watched(tmp_path / "out", GRAPH, level="off", audit={"every": 1})
    on = train(GRAPH, [callback], make_optimizer=lambda net: AdamWeightDecay(net.trainable_params(), 1e-2))
    told = [(f.rule, f.step, f.site.name if f.site else None) for f in callback.findings if f.severity != "info"]
    assert told == [("moment_recurrence", 1, on.optimizer.parameters[4].name)]


def test_a_nan_is_found_at_the_cell_where_it_is_born(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            p = run_context.original_args()
            if p.cur_step_num == 2:
                weight = next(q for q in p.train_network.trainable_params() if q.name == "blocks.1.up.weight")
                weight.set_data(ms.Tensor(np.full(weight.shape, np.nan, np.float32)))

    callback = watched(tmp_path / "out", GRAPH, level="off", monitor={"activations": {"names": ["blocks.**"]}})
    train(GRAPH, [callback, Breaks()])
    first = next(finding for finding in callback.findings if finding.rule == "nonfinite")
    assert first.step == 3 and "blocks.1.up" in first.message


def test_a_device_whose_graphs_call_no_python_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_limits, "callbacks_work", lambda: False)
    with pytest.raises(PlanError, match="calls Python from a graph on a CPU only"):
        MindSporeProbe(output=str(tmp_path / "out"), graph_callbacks=True)


class Pair(nn.Cell):
    """Returns a value that it also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(16, 16)

    def construct(self, x: Any) -> Any:
        h = self.first(x)
        return h, h * h


class Shared(nn.Cell):
    """Two cells use one tensor more than once each, one returns two, one hands its argument on, and one does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Dense(16, 16)
        self.a, self.b, self.c, self.pair, self.same = Twice(), Twice(), Twice(), Pair(), nn.Identity()

    def construct(self, x: Any) -> Any:
        h = self.start(x)
        first, second = self.pair(h)
        y = self.a(h) + self.b(self.same(h)) + self.c(h) + first + second
        return (y * y).mean()


def gradients_of(net: Any, plan: dict[str, Any] | None) -> list[bytes]:
    step = Gradients(net.set_train())
    x = ms.Tensor(np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))
    if plan is None:
        return [g.asnumpy().tobytes() for g in step(x)]
    with watch(net, level="L0", task="tensor", on_error="raise", **plan) as probe:
        for _ in range(2):
            with probe.step():
                found = step(x)
    return [g.asnumpy().tobytes() for g in found]


def test_what_could_change_bits_is_left_out_and_each_dump_and_comparison_says_so(tmp_path: Path) -> None:
    ms.set_context(mode=GRAPH)

    def shared() -> Any:
        ms.set_seed(1)
        return Shared()

    bare = gradients_of(shared(), None)
    assert gradients_of(shared(), {"output": str(tmp_path / "out"), "graph_callbacks": True}) == bare
    assert gradients_of(shared(), {"output": str(tmp_path / "all"), "graph_callbacks": "all"}) != bare
    for step in (0, 1):
        head = json.loads((tmp_path / f"out/step{step}/rank0/dump.json").read_text())
        notes = [note for note in head["trainprobe"]["notes"] if note.startswith(LEFT_OUT)]
        assert len(notes) == 1 and "all of 2 cells (pair, same)" in notes[0]
        assert "Cell.pair.Pair.forward.0" not in head["data"] and "Cell.a.Twice.forward.0" in head["data"]
    same = compare_ranks(tmp_path / "out", tmp_path / "out")
    assert [note for note in same if f"A {LEFT_OUT}" in note] and [note for note in same if f"B {LEFT_OUT}" in note]


def compare_ranks(a: Path, b: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "trainprobe", "dump-compare", str(a), str(b)], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()
