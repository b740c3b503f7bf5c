"""Both ways with mindstudio-probe itself, where its Python is at hand (TRAINPROBE_MSPROBE_PYTHON, see docs/interop.md)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import trainprobe
from tests.distributed.launch import launch
from tests.interop.peer import PEER, needs_peer
from trainprobe.cli import main
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.storage.dumps import TensorStore, read

HERE = Path(__file__).parent
pytestmark = needs_peer
OURS = {"phases": ["forward", "backward"]}


def our_dump(folder: Path, step: int = 0, **plan) -> Path:
    launch(HERE / "train_small.py", 1, "trainprobe", str(folder / "ours"), json.dumps({**OURS, **plan}))
    return folder / f"ours/step{step}/rank0"


def msprobe(*words: str) -> None:
    launch(HERE / "msprobe_small.py", 1, *words, python=str(PEER))


def their_dump(folder: Path, step: int = 0, **config) -> Path:
    msprobe("train", str(folder / "theirs"), json.dumps(config))
    found = next((folder / f"theirs/step{step}").iterdir())  # named for the process, for want of ranks
    return found.rename(found.with_name("rank0"))


def compared(folder: Path, ours: Path, theirs: Path, kind: str = "torch.") -> list[dict[str, str]]:
    """Run the other tool's comparison; return the rows of tensors (or another kind) that it found on both sides."""
    paths = ["-tp", str(ours / "dump.json"), "-gp", str(theirs / "dump.json"), "-o", str(folder / "out")]
    msprobe("compare", *paths)
    with next((folder / "out").glob("*.csv")).open(encoding="utf-8-sig") as file:
        rows = [row for row in csv.DictReader(file) if row["Bench Name"] != "N/A"]
    return [row for row in rows if row["NPU Dtype"].startswith(kind)]


def test_statistics_written_here_are_read_and_compared_there(tmp_path):
    theirs = their_dump(tmp_path, task="statistics", level="L0")
    rows = compared(tmp_path, our_dump(tmp_path, level="L0"), theirs)
    assert len(rows) > 30
    for row in rows:
        assert row["NPU Tensor Shape"] == row["Bench Tensor Shape"]
        assert {float(row["Max diff"]), float(row["Min diff"])} == {0.0}
        if row["NPU Dtype"] == "torch.float32":  # they sum in float32
            assert abs(float(row["Mean diff"])) < 1e-6
            assert abs(float(row["L2norm diff"])) < 1e-5


def test_a_step_in_a_folder_that_is_named_for_the_process_is_read(tmp_path, capsys):
    renamed = their_dump(tmp_path, task="statistics", level="mix")  # that of step 0; step 1 stays as it is
    assert not (tmp_path / "theirs/step1/rank0").exists()
    assert main(["nan-trace", str(renamed.parents[1])]) == 1
    assert "the first NaN is of step 1, on rank 0: Tensor.__add__.2.forward, input.1" in capsys.readouterr().out
    assert main(["dump-compare", "-q", str(renamed.parents[1]), str(renamed.parents[1])]) == 0


@pytest.mark.parametrize("how", [{"task": "tensor"}, {"task": "statistics"}], ids=["tensor", "statistics"])
def test_our_sheet_of_two_of_their_dumps_has_the_numbers_of_theirs(how, tmp_path):
    one = their_dump(tmp_path, 0, level="mix", **how)
    two = next((tmp_path / "theirs/step1").iterdir())
    main(["dump-compare", str(one), str(two), "-q", "--sheets", str(tmp_path / "sheets")])
    with next((tmp_path / "sheets").glob("*.csv")).open(encoding="utf-8-sig") as file:
        ours = {row["NPU Name"]: row for row in csv.DictReader(file)}
    theirs = compared(tmp_path, one, two)
    assert len(theirs) > 60
    found = [(row, ours[row["NPU Name"]]) for row in theirs if row["NPU Name"] in ours]
    both = [pair for pair in found if pair[0]["Bench Name"] == pair[1]["Bench Name"]]  # they pair by number, we by order
    assert len(both) > 0.85 * len(theirs)
    for row, mine in both:
        assert list(mine)[: list(row).index("NPU_Stack_Info")] == list(row)[: list(row).index("NPU_Stack_Info")]
        for column, text in row.items():
            if column not in ("Result", "Err_message", "NPU_Stack_Info") and {"N/A", "unsupported"}.isdisjoint(
                {text, mine[column]}
            ):
                assert _equal(text, mine[column]), (row["NPU Name"], column, text, mine[column])


def test_our_sheet_has_rows_of_plain_arguments_as_theirs_has(tmp_path):
    """Numbers, booleans and texts, every cell; of None, slices and other objects there are no rows here."""
    dumps = [our_dump(tmp_path / side, level="mix") for side in "ab"]
    main(["dump-compare", *map(str, dumps), "-q", "--sheets", str(tmp_path / "sheets")])
    with next((tmp_path / "sheets").glob("*.csv")).open(encoding="utf-8-sig") as file:
        mine = {row["NPU Name"]: row for row in csv.DictReader(file)}
    theirs = compared(tmp_path, *dumps, kind="<class")
    plain = {row["NPU Name"]: row for row in theirs if row["NPU Dtype"] != "<class 'NoneType'>" and row["NPU Name"] in mine}
    numbers = [row for row in theirs if row["NPU Dtype"] in ("<class 'int'>", "<class 'float'>", "<class 'bool'>")]
    assert len(numbers) > 8
    assert all(row["NPU Name"] in mine for row in numbers)
    assert {name: {key: mine[name][key] for key in row} for name, row in plain.items()} == plain


def _equal(text: str, mine: str) -> bool:
    """Tell whether two cells agree; statistics of theirs are float32, relative errors have six digits or a percent sign."""
    try:
        left, right = (float(cell.rstrip("%")) / (100 if cell.endswith("%") else 1) for cell in (text, mine))
    except ValueError:
        return text.lower() == mine.lower()
    return (left != left and right != right) or abs(left - right) <= 1e-4 * max(1e-2, abs(left))


@pytest.mark.parametrize("nan_tokens", [False, True])
def test_a_nan_written_here_is_an_error_there_like_their_own(nan_tokens, tmp_path):
    ours = our_dump(tmp_path, 1, level="L0", nan_tokens=nan_tokens)
    rows = compared(tmp_path, ours, their_dump(tmp_path, 0, task="statistics", level="L0"))
    assert [row["Result"] for row in rows if row["NPU max"].lower() == "nan" and ".backward." in row["NPU Name"]].count(
        "error"
    ) > 5


def test_tensors_written_here_are_read_and_compared_there(tmp_path):
    theirs = their_dump(tmp_path, task="tensor", level="L0")
    rows = compared(tmp_path, our_dump(tmp_path, level="L0", task="tensor", tensor_format="pt"), theirs)
    assert len(rows) > 30
    assert {(row["Result"], row["MaxAbsErr"]) for row in rows} <= {("pass", "0.0"), ("pass", "0"), ("pass", "unsupported")}


def test_the_crc_of_the_bytes_is_theirs(tmp_path):
    theirs = their_dump(tmp_path, task="statistics", level="L0", statistics={"summary_mode": "md5"})
    rows = compared(tmp_path, our_dump(tmp_path, level="L0", summary="md5"), theirs)
    assert len(rows) > 30
    assert all(row["NPU MD5"] == row["BENCH MD5"] for row in rows)


def test_fingerprints_written_here_are_compared_there(tmp_path):
    ours = our_dump(tmp_path, level="L0", summary="checksum")
    rows = compared(tmp_path, ours, ours)
    assert {row["Result"] for row in rows} == {"pass"}
    assert all(row["NPU MD5"].startswith("0x") for row in rows)


def test_a_dump_written_there_is_read_here_with_the_same_numbers(tmp_path):
    theirs, ours = read(their_dump(tmp_path, task="statistics", level="L0")), read(our_dump(tmp_path, level="L0"))
    mine = {(r.site, r.step.phase): r for r in ours.records()}
    found = list(theirs.records())
    assert len(found) > 30
    for record in found:
        twin = mine[record.site, record.step.phase]
        assert (record.dtype, record.shape) == (twin.dtype, twin.shape)
        assert record.values["max"] == twin.values["max"]
        assert record.values["min"] == twin.values["min"]


def test_tensors_written_there_are_read_here_and_each_operator_judged(tmp_path, capsys):
    rank = their_dump(tmp_path, task="tensor", level="mix")
    step_data, tensors = read(rank), TensorStore(rank)
    assert {entry_name(call).partition(".")[0] for call in step_data.calls} == {"Module", "Functional", "Tensor", "Torch"}
    for record in step_data.records():
        assert record.tensor is not None
        array = tensors.array(record.tensor)
        assert array.shape == record.shape
        assert array.max() == record.values["max"]
    assert main(["op-check", str(rank)]) == 0
    assert capsys.readouterr().out.startswith("every operator is right, up to rounding: 31 calls judged")


def test_buffers_that_changed_are_rows_of_their_comparison(tmp_path):
    for side, shift in (("a", 0.0), ("b", 1.0)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        with trainprobe.watch(model, plan={"output": str(tmp_path / side), **OURS}) as probe, probe.step(0):
            model(torch.ones(3, 4).cumsum(0) + shift).sum().backward()
    rows = compared(tmp_path, *(tmp_path / f"{side}/step0/rank0" for side in "ab"))
    found = {row["NPU Name"]: row for row in rows if ".running_" in row["NPU Name"]}
    assert set(found) == {f"Module.1.BatchNorm1d.forward.0.parameters.running_{name}" for name in ("mean", "var")}
    assert float(found["Module.1.BatchNorm1d.forward.0.parameters.running_mean"]["L2norm diff"]) != 0
    assert abs(float(found["Module.1.BatchNorm1d.forward.0.parameters.running_var"]["L2norm diff"])) < 1e-6
