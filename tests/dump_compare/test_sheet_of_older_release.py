"""The sheet of stored tensors beside that of mindstudio-probe 8.1.1, which the same dumps are given to."""

from __future__ import annotations

import ast
import csv
import subprocess
from pathlib import Path

import numpy as np
import openpyxl
import pytest

from tests.dump_compare.small_runs import run
from tests.interop.peer import OLDER, needs_older
from trainprobe.cli import main
from trainprobe.engine.storage.dumps import TensorStore

pytestmark = needs_older
THEIRS = """
import sys
from msprobe.pytorch.compare.pt_compare import compare
a, b, out = sys.argv[1:]
paths = {"npu_json_path": f"{a}/dump.json", "bench_json_path": f"{b}/dump.json", "stack_json_path": f"{a}/stack.json"}
compare({**paths, "is_print_compare_log": False}, out, auto_analyze=False)
"""
OF_ZEROS = ("MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")  # of a smaller epsilon there
OTHER_TEXTS = ("Err_message", "NPU_Stack_Info")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> tuple[list[dict], dict[str, dict], list[Path]]:
    """Their rows, ours by name, and the folders of both dumps."""
    folder = tmp_path_factory.mktemp("sheets")
    plan = {"dropout": 0.0, "level": "mix", "task": "tensor", "tensor_format": "pt"}
    ranks = [run(folder / side, what, **plan) / "step0" / "rank0" for side, what in (("a", ""), ("b", "gelu"))]
    (folder / "out").mkdir()
    done = subprocess.run([OLDER["8.1.1"], "-c", THEIRS, *map(str, ranks), str(folder / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    heads, *lines = openpyxl.load_workbook(next((folder / "out").glob("*.xlsx"))).active.iter_rows(values_only=True)
    theirs = [dict(zip(heads, line, strict=True)) for line in lines]
    assert main(["dump-compare", *map(str, ranks), "-q", "--sheets", str(folder / "ours"), "--xlsx"]) == 2
    heads, *lines = openpyxl.load_workbook(next((folder / "ours").glob("*.xlsx"))).active.iter_rows(values_only=True)
    main(["dump-compare", *map(str, ranks), "-q", "--sheets", str(folder / "ours")])
    with next((folder / "ours").glob("*.csv")).open(encoding="utf-8-sig") as file:
        ours = {row["NPU Name"]: row for row in csv.DictReader(file)}
    assert [str(line[0]) for line in lines] == [*ours]
    return theirs, ours, ranks


def number(cell: object) -> float | str:
    try:
        return float(str(cell))
    except ValueError:
        return str(cell)


def test_every_tensor_of_theirs_is_a_row_of_ours(sheets):
    theirs, ours, _ = sheets
    tensors = [row for row in theirs if str(row["NPU Dtype"]).startswith("torch.")]
    assert len(tensors) > 100
    assert [row["NPU Name"] for row in tensors if row["NPU Name"] not in ours] == []
    assert any(".forward.kwargs.weight" in row["NPU Name"] for row in tensors)
    assert set(theirs[0]) <= set(next(iter(ours.values())))


def test_the_cells_of_a_tensor_are_those_of_theirs(sheets):
    theirs, ours, ranks = sheets
    stores, differ, zeros = [TensorStore(rank) for rank in ranks], set(), set()
    for row in (row for row in theirs if str(row["NPU Dtype"]).startswith("torch.")):
        mine = ours[row["NPU Name"]]
        bench = stores[1].array(ast.literal_eval(row["Data_name"])[1])
        if bench.size and not np.asarray(bench).all():
            zeros.add(row["NPU Name"])
        for head in (head for head in row if head not in OTHER_TEXTS):
            x, y = number(row[head]), number(mine[head])
            same = x == y if isinstance(x, str) or isinstance(y, str) else abs(x - y) <= 1e-4 * max(1e-2, abs(x))
            if not same and head in OF_ZEROS:
                differ.add(row["NPU Name"])
            else:
                assert same, (row["NPU Name"], head, row[head], mine[head])
    assert differ <= zeros
    assert {row["Accuracy Reached or Not"] for row in theirs} >= {"Yes", "None"}
