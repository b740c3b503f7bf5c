"""`compare` and `compare_distributed`: the arguments and the files of scripts that were written for mindstudio-probe."""

import csv
import json
import re
import shutil

import pytest

from tests.dump_compare.small_runs import run
from trainprobe.errors import FormatError, UsageError
from trainprobe.pytorch import compare, compare_distributed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a step of a run, and of one with another activation."""
    folder = tmp_path_factory.mktemp("runs")
    return [run(folder / side, change, level="L0", step=[0]) / "step0" for side, change in (("a", ""), ("b", "gelu"))]


def rows_of(path):
    with path.open(encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("as_file", [False, True])
def test_two_ranks_are_compared_as_the_arguments_say(tmp_path, capsys, runs, as_file):
    told = {"npu_path": f"{runs[0]}/rank0/dump.json", "bench_path": f"{runs[1]}/rank0/dump.json", "is_print_compare_log": True}
    if as_file:
        (tmp_path / "compare.json").write_text(json.dumps(told))
    code = compare(tmp_path / "compare.json" if as_file else told, tmp_path / "out", suffix="_mine", fuzzy_match=True)
    said = capsys.readouterr().err
    assert code == 2 and "the first difference is at Module.layers.1.act.GELU.forward.0" in said
    assert "fuzzy_match=True has no effect: " in said and "is_print_compare_log=True has no effect: " in said
    sheet, advisor = next((tmp_path / "out").glob("compare_result_mine_*.csv")), next((tmp_path / "out").glob("advisor_*.txt"))
    rows = rows_of(sheet)
    assert next(row["NPU Name"] for row in rows if row["Result"] == "error") == "Module.layers.1.act.GELU.forward.0.output.0"
    text = advisor.read_text()
    assert text.startswith("the first difference is at Module.layers.1.act.GELU.forward.0") and str(runs[0] / "rank0") in text


def test_all_ranks_of_a_step_have_a_sheet(tmp_path, capsys, runs):
    sides = [shutil.copytree(step, tmp_path / f"side{i}") for i, step in enumerate((runs[0], runs[0]))]
    for side, step in zip(sides, runs, strict=True):
        shutil.copytree(step / "rank0", side / "rank1")
    assert compare_distributed(*sides, tmp_path / "out", auto_analyze=False) == 2
    assert "rank 1" in capsys.readouterr().err
    words = {path.name.split("_")[2]: {row["Result"] for row in rows_of(path)} for path in (tmp_path / "out").iterdir()}
    assert words.keys() == {"rank0", "rank1"} and "error" in words["rank1"] and words["rank0"] == {"pass"}


def test_a_step_of_several_ranks_in_the_file_of_arguments_has_a_sheet_a_rank(tmp_path, runs):
    sides = [shutil.copytree(step, tmp_path / f"side{i}") for i, step in enumerate(runs)]
    for side, step in zip(sides, runs, strict=True):
        shutil.copytree(step / "rank0", side / "rank1")
    (tmp_path / "compare.json").write_text(json.dumps({"npu_path": str(sides[0]), "bench_path": str(sides[1])}))
    assert compare(tmp_path / "compare.json", tmp_path / "out", suffix="_mine", auto_analyze=False) == 2
    names = sorted(path.name.rpartition("_")[0] for path in (tmp_path / "out").iterdir())
    assert names == ["compare_result_rank0_mine", "compare_result_rank1_mine"]


def test_fingerprints_keep_their_leading_zeros(tmp_path):
    """Of so many fingerprints some begin with a zero; they are those of the dump, as text."""
    step = run(tmp_path / "md5", level="L0", step=[0], summary="md5") / "step0"
    compare({"npu_path": str(step), "bench_path": str(step)}, tmp_path / "out", auto_analyze=False)
    told = [row["NPU MD5"] for row in rows_of(next((tmp_path / "out").iterdir()))]
    assert {len(text) for text in told} == {8} and any(text.startswith("0") for text in told)
    assert set(told) == set(re.findall(r'"md5": "(\w+)"', (step / "rank0/dump.json").read_text()))


def test_arguments_that_cannot_be_used_are_errors(tmp_path, runs):
    with pytest.raises(UsageError, match="needs npu_path and bench_path"):
        compare({"npu_path": str(runs[0])}, tmp_path)
    with pytest.raises(UsageError, match="takes no suffix"):
        compare_distributed(*runs, tmp_path, suffix="_mine")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(FormatError, match=r"broken\.json is no JSON"):
        compare(tmp_path / "broken.json", tmp_path)
