"""MindSpore's own dump of every kernel in graph mode, written by MindSpore, read by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mindspore.launch import run
from trainprobe.cli import main
from trainprobe.engine.core.records import Call
from trainprobe.engine.storage.dumps import open_tensors, read
from trainprobe.engine.storage.dumps.layout import find_dumps


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dumps of three runs."""
    folder = tmp_path_factory.mktemp("dumps")
    told = []
    for name, (how, plan) in RUNS.items():
        (folder / f"{name}_plan.json").write_text(json.dumps({"output": str(folder / name), "task": "tensor", **plan}))
        settings = folder / f"{name}.json"
        words = ["kernel-dump", "configure", str(folder / f"{name}_plan.json"), "-o", str(settings), "--device", "cpu"]
        assert main(words) == 0
        told.append(run("run_graph_dump", str(settings), *how, cwd=folder))
    assert float(told[0]["losses"][1]) < float(told[0]["losses"][0])
    assert told[0] == told[1] == told[3]
    return folder


WHOLE = {"step": ["0-1"]}
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": ((), WHOLE),
    "other": ((), WHOLE),
    "bad": (("inf",), WHOLE),
    "chosen": ((), {"step": [1], "ops": ["Kernel.MatMul"], "data": ["output"]}),
}


def test_the_kernels_are_those_that_the_model_launches(dumps: Path) -> None:
    found = find_dumps(dumps / "one")
    assert {step: list(ranks) for step, ranks in found.items()} == {0: [0], 1: [0]}
    step_data, store = read(found[0][0]), open_tensors(found[0][0])
    kernels = [call for call in step_data.calls if call.kind == "op"]
    launched = [(call, call.parent) for call in kernels if isinstance(call.parent, Call)]
    forward = [(call.name, parent.name) for call, parent in launched if "Gradients" not in call.name]
    assert forward == [
        *(("Kernel.MatMul", "block.up"), ("Kernel.BiasAdd", "block.up"), ("Kernel.ReLU", "block.act")),
        *(("Kernel.MatMul", "block.down"), ("Kernel.BiasAdd", "block.down"), ("Kernel.Add", "block")),
        *(("Kernel.MatMul", "head"), ("Kernel.BiasAdd", "head"), ("Kernel.SparseSoftmaxCrossEntropyWithLogits", "_loss_fn")),
    ]
    product = kernels[0]
    x, weight, out = (store.array(value.tensor) for value in (*product.args[:2], product.out[0]))
    assert np.allclose(x @ weight.T, out, atol=1e-6)
    assert "self.up(x)" in step_data.stacks[product.stack][0]
    assert any(call.name == "Kernel.Gradients.MatMul" for call in step_data.calls)
    assert {call.phase for call in step_data.calls if call.name == "Kernel.ApplyMomentum"} == {"optimizer"}
    held = {call.name: call.params["value_after"] for call in step_data.calls if call.kind == "state"}
    assert held["block.up.weight"].shape == (8, 4)
    assert step_data.notes == ()


def test_two_equal_runs_agree_and_an_infinity_is_traced_to_the_batch(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump-compare", str(dumps / "one"), str(dumps / "other"), "-q"]) == 0
    assert main(["dump-compare", str(dumps / "one"), str(dumps / "bad")]) == 2
    assert "Kernel.MatMul.0.forward (step 0, rank 0): it is given something else, input.0" in capsys.readouterr().out
    assert main(["nan-trace", str(dumps / "one")]) == 0
    assert main(["nan-trace", str(dumps / "bad")]) == 1
    told = capsys.readouterr().out
    assert "Kernel.MatMul.0.forward, input.0, in block.up" in told
    assert "run_graph_dump.py" in told
    page = dumps / "page.html"
    assert main(["show", str(dumps / "one"), "-o", str(page)]) == 0
    assert page.exists()


def test_the_settings_of_a_plan_choose_step_kernels_and_outputs(dumps: Path) -> None:
    found = find_dumps(dumps / "chosen")
    assert {step: list(ranks) for step, ranks in found.items()} == {1: [0]}
    calls = read(found[1][0]).calls
    assert {call.name.removeprefix("Kernel.").removeprefix("Gradients.") for call in calls if call.kind == "op"} == {"MatMul"}
    assert all(not call.args and call.out for call in calls if call.kind == "op")
