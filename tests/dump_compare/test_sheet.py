"""The sheet of a comparison: a row a tensor, numbers as NumPy works them out, a word for each result."""

import csv

import numpy as np
import openpyxl
import pytest

from tests.dump_compare.small_runs import run
from trainprobe.cli import main
from trainprobe.engine.storage.dumps import TensorStore


def sheet_of(tmp_path, capsys, **plan):
    """Compare two runs, the second of which has another activation; return the rows by name."""
    a, b = run(tmp_path / "a", "", dropout=0.0, **plan), run(tmp_path / "b", "gelu", dropout=0.0, **plan)
    assert main(["dump-compare", str(a), str(b), "-q", "--sheets", str(tmp_path / "sheets")]) == 2
    capsys.readouterr()
    with next((tmp_path / "sheets").glob("compare_result_step*_rank0.csv")).open(encoding="utf-8-sig") as file:
        return a, b, {row["NPU Name"]: row for row in csv.DictReader(file)}


def test_errors_of_stored_tensors_are_those_of_numpy(tmp_path, capsys):
    a, b, rows = sheet_of(tmp_path, capsys, level="L0", task="tensor")
    found = 0
    for row in rows.values():
        if row["Verdict"] == "missing" or row["Cosine"] in ("N/A", "unsupported"):
            continue
        names = [text.strip(" '") for text in row["Data_name"].strip("[]").split(",")]
        x, y = (
            TensorStore(next(folder.rglob("dump.json")).parent).array(name) for folder, name in zip((a, b), names, strict=True)
        )
        x, y = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
        assert float(row["EucDist"]) == pytest.approx(np.linalg.norm(x - y))
        assert float(row["MaxAbsErr"]) == pytest.approx(np.abs(x - y).max())
        if x.any() and y.any():
            assert float(row["Cosine"]) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
        if (y != 0).all():
            relative = np.abs(x - y) / np.abs(y)
            assert float(row["MaxRelativeErr"]) == pytest.approx(relative.max())
            assert float(row["One Thousandth Err Ratio"]) == pytest.approx((relative < 1e-3).mean())
        found += 1
    assert found > 20
    assert {row["Result"] for row in rows.values()} >= {"pass", "error"}


@pytest.mark.parametrize("plan", [{"level": "L0"}, {"level": "L0", "summary": "md5"}], ids=["statistics", "md5"])
def test_a_result_that_is_wrong_has_an_error_and_those_before_it_pass(tmp_path, capsys, plan):
    _, _, rows = sheet_of(tmp_path, capsys, **plan)
    words = [row["Result"] for row in rows.values()]
    assert words[0] == "pass"
    if "summary" not in plan:
        first = next(row for row in rows.values() if row["Result"] == "error")
        assert ".output." in first["NPU Name"]
        assert first["Verdict"] == "bug"


def test_a_workbook_has_the_same_cells(tmp_path, capsys):
    a, b, rows = sheet_of(tmp_path, capsys, level="L0")
    main(["dump-compare", str(a), str(b), "-q", "--sheets", str(tmp_path / "books"), "--xlsx"])
    sheet = openpyxl.load_workbook(next((tmp_path / "books").glob("*.xlsx"))).active
    heads, *lines = sheet.iter_rows(values_only=True)
    assert len(lines) == len(rows)
    for line in lines:
        cells = dict(zip(heads, line, strict=True))
        assert cells["Result"] == rows[cells["NPU Name"]]["Result"]
    assert main(["dump-compare", str(a), str(b), "--xlsx"]) == 3
