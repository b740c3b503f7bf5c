"""A name in a dump, or in what a training sends, names an operator and nothing else that torch can do."""

from __future__ import annotations

import pytest
import torch

from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check
from trainprobe.op_check.functions import function


@pytest.mark.parametrize(
    "name",
    [
        *("Torch.load", "Torch.save", "Torch.from_file", "Torch.compile", "Torch.manual_seed", "Torch.set_num_threads"),
        *("load_library.__call__", "Aten.save", "Aten.from_file", "aten.from_file.default", "_dir.__class__", "aten.__class__"),
    ],
)
def test_what_is_no_operator_is_not_called(name: str) -> None:
    assert function(name) is None
    judged = check(Case(name, ("/nowhere/at/all", True, 4), {}, [torch.zeros(4)])).worst
    assert (judged.outcome, judged.reason.partition(" in this")[0]) == ("not checked", f"there is no {name}")


@pytest.mark.parametrize(
    "name",
    ["Torch.einsum", "Torch.unique", "Torch.ones", "Torch.fft_fft", "Aten.mm.default", "Tensor.__add__", "Functional.linear"],
)
def test_operators_are_found(name: str) -> None:
    assert callable(function(name))
