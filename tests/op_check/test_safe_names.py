"""A name in a dump, or in what a training sends, names an operator and nothing else that torch can do."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.storage.sheet_cells import FORMULA
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


def test_no_cell_of_the_table_is_a_formula(tmp_path: Path) -> None:
    """Entries of a dump are named as whoever wrote it likes."""
    model = torch.nn.Linear(4, 2)
    plan = {"level": "L1", "task": "tensor", "sinks": ["dump"], "console": False, "output": tmp_path}
    with trainprobe.watch(model, torch.optim.SGD(model.parameters(), 0.1), plan) as probe, probe.step():
        model(torch.ones(3, 4)).sum().backward()
    path = next(tmp_path.rglob("dump.json"))
    text = path.read_text()
    for sign in "=+-@\t\r":
        path.write_text(text.replace('"Functional.', json.dumps(sign)[:-1] + "Functional."))
        main(["op-check", str(tmp_path), "-q", "--csv", str(tmp_path / "table.csv")])
        with (tmp_path / "table.csv").open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert any("Functional.linear" in cell for cell in cells)
        assert not [cell for cell in cells if cell[:1] in FORMULA and cell and not cell.lstrip("+-").replace(".", "").isdigit()]
