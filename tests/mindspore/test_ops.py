"""Operators, gradients at inputs, and what the user saves (L1, mix, debug), against MindSpore's own hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback
from safetensors.numpy import load_file

from tests.mindspore.tiny import GRAPH, PYNATIVE, Net, train
from trainprobe.integrations.mindformers import ProbeCallback

BESIDE = ("typeof",)  # what PyNative mode asks of itself, and calculates nothing
ASYNCHRONOUS = ("test_every_forward_primitive_is_there_in_order_and_no_bit_changes",)


def dumped(output: Path, level: str, **plan: Any) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """Train with a full dump of step 2; return the outcome, the entries and the tensors."""
    whole = {"output": str(output), "level": level, "task": "tensor", "step": [2], "stacks": False, "on_error": "raise", **plan}
    callback = ProbeCallback(whole)
    on = train(PYNATIVE, [callback])
    folder = output / "step2/rank0"
    assert [f for f in callback.findings if f.severity != "info"] == []
    return on, json.loads((folder / "dump.json").read_text()), load_file(folder / "tensors.safetensors")


class Listens(Callback):
    """The names of all primitives of step 2, as MindSpore itself hands them over."""

    def __init__(self) -> None:
        self.names: list[str] = []
        names = self.names

        class Mode(ms.MsDispatchMode):
            def __ms_dispatch__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
                names.append(func.name)
                return func(*args, **(kwargs or {}))

        self.mode = Mode()

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 2:
            self.mode.__enter__()

    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 2:
            self.mode.__exit__(None, None, None)


@pytest.mark.proves("MindSpore", "operators")
@pytest.mark.parametrize("level", ["L1", "mix"])
def test_every_forward_primitive_is_there_in_order_and_no_bit_changes(level: str, tmp_path: Path) -> None:
    own = Listens()
    bare = train(PYNATIVE, [own])
    before = nn.Cell.__call__
    on, dump, _ = dumped(tmp_path / "out", level)
    assert on.bits == bare.bits
    assert nn.Cell.__call__ is before
    seen = [name for name in dump["data"] if name.startswith("Primitive.") and name.endswith(".forward")]
    assert len(seen) == 33
    forward = [name for name in own.names if name not in BESIDE][: len(seen)]
    assert [name.split(".")[1] for name in seen] == forward
    assert [name for name in dump["data"] if name.startswith("Cell.")] == [] or level == "mix"


def test_recorded_operators_calculate_what_numpy_does(tmp_path: Path) -> None:
    _, dump, tensors = dumped(tmp_path / "out", "L1")
    entries = {name: entry for name, entry in dump["data"].items() if name.endswith(".forward")}

    def taken(name: str) -> tuple[list[np.ndarray], np.ndarray]:
        given = [tensors[a["data_name"]].astype(np.float64) for a in entries[name]["input_args"] if "data_name" in (a or {})]
        return given, tensors[entries[name]["output"][0]["data_name"]].astype(np.float64)

    products = [name for name in entries if name.startswith("Primitive.MatMul.")]
    assert len(products) == 5
    for name in products:
        (a, b), out = taken(name)
        np.testing.assert_allclose(out, a @ b.T, rtol=0, atol=1e-5)
    for i in range(5):
        (x, bias), out = taken(f"Primitive.BiasAdd.{i}.forward")
        np.testing.assert_allclose(out, x + bias, rtol=0, atol=1e-6)


def test_mix_puts_operators_into_their_cells(tmp_path: Path) -> None:
    dumped(tmp_path / "out", "mix")
    tree = json.loads((tmp_path / "out/step2/rank0/construct.json").read_text())
    inside = {name: parent for name, parent in tree.items() if name.startswith("Primitive.") and name.endswith(".forward")}
    assert inside["Primitive.GeLU.1.forward"] == "Cell.blocks.1.act.GELU.forward.0"
    assert inside["Primitive.AddExt.0.forward"] == "Cell.blocks.0.Block.forward.0"
    assert inside["Primitive.SparseSoftmaxCrossEntropyWithLogits.0.forward"] is None  # the loss stands beside the model


def test_gradients_at_inputs_are_those_of_the_frameworks_hook_where_nothing_else_used_the_input(tmp_path: Path) -> None:
    found: dict[str, np.ndarray] = {}
    steps: list[int] = []

    def prepare(net: Any) -> None:
        def backward(name: str) -> Any:
            def see(cell: Any, grad_input: Any, grad_output: Any) -> None:
                steps.append(len(steps) // 2 + 1)
                if steps[-1] == 2:
                    found[name] = grad_input[0].asnumpy().copy()

            return see

        for name in ("up", "down"):
            getattr(net.blocks[0], name).register_backward_hook(backward(name))

    train(PYNATIVE, prepare=prepare)
    assert set(found) == {"up", "down"}
    _, dump, tensors = dumped(tmp_path / "out", "L0")
    for name, gradient in found.items():
        entry = dump["data"][f"Cell.blocks.0.{name}.Dense.backward.0"]
        assert tensors[entry["output"][0]["data_name"]].tobytes() == gradient.tobytes()
    # the input of a block goes into its norm and into the sum after it: the norm's record holds both shares, and a note says so
    both = [dump["data"][f"Cell.blocks.0.{cell}.backward.0"]["output"][0] for cell in ("Block", "norm.LayerNorm")]
    assert tensors[both[0]["data_name"]].tobytes() == tensors[both[1]["data_name"]].tobytes()
    assert any("everything that used the tensor" in note for note in dump["trainprobe"]["notes"])


def test_the_gradient_at_a_weight_of_an_operator_is_the_one_that_the_optimizer_gets(tmp_path: Path) -> None:
    held = train(PYNATIVE, hold=True).held[1]
    _, dump, tensors = dumped(tmp_path / "out", "L1")
    at_weight = dump["data"]["Primitive.MatMul.4.backward"]["output"][1]
    assert tensors[at_weight["data_name"]].tobytes() == held["grad|head.weight"].tobytes()


def test_what_the_user_saves_is_recorded_with_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[tuple[np.ndarray, np.ndarray]] = []

    def takes(self: Any, x: Any) -> Any:
        y = self.embed(x)
        y.register_hook(lambda gradient: values.append((y.asnumpy().copy(), gradient.asnumpy().copy())))
        return self.head(self.drop(self.blocks(y)))

    with monkeypatch.context() as own:
        own.setattr(Net, "construct", takes)
        bare = train(PYNATIVE)
    plan = {"output": str(tmp_path / "out"), "level": "debug", "task": "tensor", "stacks": False, "on_error": "raise"}
    callback = ProbeCallback(plan)

    def saves(self: Any, x: Any) -> Any:
        y = self.embed(x)
        callback.save({"embedded": y, "words": 3}, "mine")
        return self.head(self.drop(self.blocks(y)))

    monkeypatch.setattr(Net, "construct", saves)
    on = train(PYNATIVE, [callback])
    assert on.bits == bare.bits
    dump = json.loads((tmp_path / "out/step2/rank0/debug.json").read_text())["data"]
    tensors = load_file(tmp_path / "out/step2/rank0/tensors.safetensors")
    value, gradient = dump["mine.0.debug"]["embedded"], dump["mine_grad.0.debug"]["embedded"]
    assert tensors[value["data_name"]].tobytes() == values[1][0].tobytes()
    assert tensors[gradient["data_name"]].tobytes() == values[1][1].tobytes()


def test_in_a_graph_operators_are_not_seen_and_it_is_said(tmp_path: Path) -> None:
    bare = train(GRAPH)
    callback = ProbeCallback({"output": str(tmp_path / "out"), "level": "L1", "stacks": False, "on_error": "raise"})
    assert train(GRAPH, [callback]).bits == bare.bits
    assert any("MindSpore compiles this model into a graph" in finding.message for finding in callback.findings)
