"""Operators of a model that ranks split differently: compared where their split is proven, counted where it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_layouts
from tests.dump_compare.test_other_layouts import _Known
from trainprobe.cli import main
from trainprobe.dump_compare import parallel_ranks
from trainprobe.dump_compare.layouts.joined import RankPart
from trainprobe.dump_compare.layouts.known_values import KnownValues
from trainprobe.dump_compare.layouts.operators import forward_joins
from trainprobe.engine.core.records import Call, Value

HEALTHY = ["ddp", "pipeline", "tensor", "fsdp2"]
FAULTS = {"gelu": "Functional.gelu.1.forward (step 0", "attention": "Functional.scaled_dot_product_attention.1.forward (step 0"}
PLANTED = ["ddp+mix:gelu", "pipeline+mix:attention", "tensor+mix:attention"]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("operators")
    train_layouts.train(folder / "alone", level="mix")
    script = train_layouts.__file__
    launch(script, 2, str(folder), *[f"{kind}+mix" for kind in HEALTHY], *PLANTED, timeout=300)
    return folder


def compared(dumps: Path, a: str, b: str, capsys) -> tuple[int, str, list[dict]]:
    code = main(["dump-compare", str(dumps / a), str(dumps / b), "--json", str(dumps / "all.json")])
    return code, capsys.readouterr().out, json.loads((dumps / "all.json").read_text())["calls"]


@pytest.mark.parametrize("kind", HEALTHY)
def test_operators_of_a_healthy_layout_agree_within_rounding(dumps, capsys, kind):
    code, said, calls = compared(dumps, "alone", f"{kind}+mix", capsys)
    assert code == (0 if kind == "pipeline" else 1), said
    assert {call["verdict"] for call in calls} <= {"identical", "rounding", "carried"}
    names = {call["a"] for call in calls}
    assert {f"Functional.{name}" for name in ("gelu.1.forward", "gelu.1.backward", "layer_norm.3.forward")} <= names
    assert "Tensor.view.5.forward" in names
    left = [int(count) for count in re.findall(r"• (\d+) calls of operators", said)]
    assert sum(left) > 0, said
    counts = "calls of operators outside modules are not compared, as they may count ranks or micro-batches"
    assert (counts in said) == (kind in ("ddp", "fsdp2")), said
    assert ("Tensor.div.0.forward" in names) == (kind == "tensor")


@pytest.mark.parametrize("layout", PLANTED)
def test_what_is_planted_in_an_operator_of_one_rank_is_named_first(dumps, capsys, layout):
    code, said, _ = compared(dumps, "alone", layout, capsys)
    assert code == 2
    assert FAULTS[layout.partition(":")[2]] in said.splitlines()[0], said


@pytest.fixture
def spoken(dumps, monkeypatch, tmp_path, capsys):
    """Return the exit code, what is printed and all calls of both steps of two layouts."""

    def ask(*more: str) -> list[object]:
        pair, path = [str(dumps / "alone"), str(dumps / "tensor+mix:attention")], tmp_path / "all.json"
        code = main(["dump-compare", *pair, "--json", str(path), *more])
        return [code, capsys.readouterr().out, json.loads(path.read_bytes())]

    return ask


def test_processes_give_the_answer_of_one_for_the_steps_of_two_layouts(spoken, monkeypatch):
    before, used = spoken(), list[int]()
    monkeypatch.setattr(parallel_ranks, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(parallel_ranks, "cores", lambda: used.append(1) or 2)
    assert spoken() == before
    assert used


@pytest.mark.slow
def test_ray_gives_the_answer_of_one_process_for_the_steps_of_two_layouts(spoken, cluster):
    before = spoken()
    assert spoken("--ray") == before


def ways(
    name: str, whole: dict[str, np.ndarray], ranks: list[dict[str, np.ndarray]], arguments=(), known=("input.0", "input.1")
):
    """Return how each value of an operator lies over two ranks of samples, given what one process has there; or None."""

    def parts(of: list[dict[str, np.ndarray]]) -> dict[str, list[RankPart]]:
        return {
            slot: [
                RankPart(_Known(one[slot]), Value(0, "torch.float64", one[slot].shape), i, (0, i)) for i, one in enumerate(of)
            ]
            for slot in of[0]
        }

    def call() -> Call:
        made = Call("op", name, 0, "forward")
        made.args = list(arguments)
        return made

    a, b, seen = parts([whole]), parts(ranks), KnownValues()
    for slot in known:
        seen.add(b.get(slot, []))
    found = forward_joins([[call()], [call(), call()]], a, b, seen)
    return None if found is None else {slot: way for slot, (_, _, way) in found.items()}


X = np.random.default_rng(0).normal(size=(4, 6))


def halves(function, axis=0) -> list[dict[str, np.ndarray]]:
    return [{"input.0": half, "output": function(half)} for half in np.split(X, 2, axis)]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "function", "axis", "way"),
    [
        ("Functional.gelu", np.tanh, 0, "parts"),
        ("Functional.gelu", np.tanh, 1, "parts"),
        ("Functional.softmax", softmax, 0, "parts"),
        ("Functional.softmax", softmax, 1, None),  # along the classes, of which each rank holds some
        ("Tensor.argsort", lambda x: np.argsort(x, 0), 0, None),  # places among the samples of one rank
        ("Tensor.cumsum", lambda x: np.cumsum(x, 0), 0, None),
        ("Tensor.flip", lambda x: x[::-1], 0, None),
        (
            "Tensor.count_nonzero",
            lambda x: np.array(float(x.size)),
            0,
            None,
        ),  # the same on all ranks, and no copy of that of the whole
        ("Functional.mse_loss", lambda x: (x * x).mean(), 0, "mean"),
        ("Tensor.sum", lambda x: x.sum(), 0, None),
    ],
)
def test_an_operator_is_compared_only_where_parts_of_its_result_are_proven(name, function, axis, way):
    array = lambda x: np.asarray(function(x))  # noqa: E731
    found = ways(name, {"input.0": X, "output": array(X)}, halves(array, axis))
    assert found == (None if way is None else {"input.0": "parts", "output": way})


def test_nothing_is_made_of_parts_that_nobody_knows():
    assert ways("Functional.gelu", {"input.0": X, "output": X}, halves(np.asarray), known=()) is None


def test_sums_that_ranks_have_not_reduced_are_not_known():
    left, right = np.split(X, 2, 1)
    weight = np.random.default_rng(1).normal(size=(6, 3))
    upper, lower = np.split(weight, 2)
    ranks = [{"input.0": x, "input.1": w, "output": x @ w} for x, w in ((left, upper), (right, lower))]
    assert ways("Torch.matmul", {"input.0": X, "input.1": weight, "output": X @ weight}, ranks) is None


def test_what_ranks_make_of_copies_must_be_copies():
    ranks = [{"input.0": X, "output": X + wrong} for wrong in (0.0, 0.1)]
    assert ways("Functional.relu", {"input.0": X, "output": X}, ranks) == {"input.0": "copies", "output": "copies"}
    assert ways("Functional.dropout", {"input.0": X, "output": X}, ranks) is None


def test_what_ranks_take_out_of_copies_may_be_their_own():
    ranks = [{"input.0": X, "output": X[rank]} for rank in (0, 1)]
    assert ways("Tensor.__getitem__", {"input.0": X, "output": X[0]}, ranks) is None
