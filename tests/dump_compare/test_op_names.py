"""The table of common names of operators holds names that torch has, each once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from trainprobe.dump_compare import frameworks

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
