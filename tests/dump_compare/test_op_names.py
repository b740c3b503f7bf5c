"""The table of common names of operators holds names that torch has, each once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from trainprobe.dump_compare import frameworks
from trainprobe.dump_compare.pairing import pair_calls
from trainprobe.engine.core.records import Call

TABLE = yaml.safe_load((Path(frameworks.__file__).parent / "op_names.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("common", TABLE)
def test_the_names_of_ops_are_those_of_torch(common: str) -> None:
    owners = (torch, torch.nn.functional, torch.Tensor)
    for name in TABLE[common]["torch"]:
        assert any(hasattr(owner, name) for owner in owners)
        assert frameworks.common_name(f"Torch.{name}") == common


def test_no_name_stands_twice() -> None:
    for sort in ("torch", "primitive"):
        names = [name for row in TABLE.values() for name in row[sort]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("recorded", "common"),
    [("Tensor.__add__", "add"), ("Tensor.add_", "add"), ("Tensor.__matmul__", "matmul"), ("Tensor.__iadd__", "add")],
)
def test_operators_and_methods_in_place_have_the_name_of_their_function(recorded: str, common: str) -> None:
    assert frameworks.common_name(recorded) == common


def test_what_only_moves_data_has_no_common_name() -> None:
    assert [frameworks.common_name(name) for name in ("Tensor.reshape", "Primitive.Transpose", "Tensor.__getitem__")] == [
        None
    ] * 3


OURS = ("Primitive.MatMul", "Primitive.BiasAdd", "Primitive.ReLU", "Primitive.AddExt", "Primitive.Reshape")
OTHER = ("Primitive.matmul.MatMul", "Primitive.bias_add.BiasAdd", "Functional.relu", "Tensor.__add__", "Mint.add")
PAIRS = {
    "Primitive.MatMul": "Primitive.matmul.MatMul",
    "Primitive.BiasAdd": "Primitive.bias_add.BiasAdd",
    "Primitive.ReLU": "Functional.relu",
    "Primitive.AddExt": "Tensor.__add__",
}


@pytest.mark.parametrize("swapped", [False, True])
def test_operators_of_mindspore_are_paired_whichever_tool_named_them(swapped: bool) -> None:
    """Beside its operators each side has one more, which has no partner. mindstudio-probe names APIs and attributes."""
    ours, other = ([Call("op", name, 0, "forward") for name in names] for names in (OURS, OTHER))
    pairs = pair_calls(*((other, ours) if swapped else (ours, other)))
    both = [(pair.a.name, pair.b.name) for pair in pairs if pair.a is not None and pair.b is not None]
    assert dict((b, a) if swapped else (a, b) for a, b in both) == PAIRS
    assert len(pairs) == len(PAIRS) + 2


def test_operators_of_torch_keep_the_names_that_they_have() -> None:
    """`Torch.relu` and `Functional.relu` are two functions there."""
    pairs = pair_calls([Call("op", "Torch.relu", 0, "forward")], [Call("op", "Functional.relu", 0, "forward")])
    assert [(pair.a is None, pair.b is None) for pair in pairs] == [(False, True), (True, False)]
