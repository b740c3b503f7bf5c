"""The files and commands of mindstudio-probe's accuracy check; its own program reads what is written here."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import nn

import trainprobe
from tests.interop.peer import PEER, needs_peer
from trainprobe.cli import main
from trainprobe.op_check.classic.columns import DETAILS_COLUMNS, PRECISION_COLUMNS
from trainprobe.op_check.standards.metrics import measure

Record = dict[str, str]


class Mixed(nn.Module):
    """Operators of each list: convolution, linear, addition, transpose, softmax, argmax; 16 bits and 32, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(36, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(F.softmax(self.conv(x).flatten(1), -1) + 1.0)
        h = F.dropout(h, 0.5).to(torch.bfloat16)
        best = torch.argmax(h, -1)
        half = torch.matmul(h, h.transpose(0, 1)).to(torch.float16)
        return half.float().sum() + best.sum() + (h.double() * h.double()).float().sum()


def recorded(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Mixed()
    x = torch.randn(4, 1, 5, 5)
    with trainprobe.watch(model, level="L1", task="tensor", step=[0], output=str(folder), console=False) as probe, probe.step():
        model(x).backward()
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def wrong(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same dump with a linear layer that is off by 3 %."""
    folder = tmp_path_factory.mktemp("wrong")
    at = folder / "step0" / "rank0"
    at.mkdir(parents=True)
    for path in (dump / "step0" / "rank0").iterdir():
        (at / path.name).write_bytes(path.read_bytes())
    tensors = {name: t.clone() for name, t in load_file(at / "tensors.safetensors").items()}
    tensors["Functional.linear.0.forward.output"] *= 1.03
    save_file(tensors, at / "tensors.safetensors")
    return folder


def table(folder: Path, kind: str) -> list[Record]:
    (path,) = folder.glob(f"{kind}_*.csv")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def info(dump: Path) -> str:
    return str(dump / "step0" / "rank0" / "dump.json")


def classic(*arguments: str) -> int:
    return main(["op-check", "classic", *arguments])


def statuses(records: list[Record]) -> dict[str, tuple[str, str]]:
    return {next(iter(r.values())): (r["Forward Test Success"], r["Backward Test Success"]) for r in records}


def test_acc_check_writes_both_tables_with_each_call_once(dump: Path, tmp_path: Path) -> None:
    code = classic("acc_check", "-api_info", info(dump), "-o", str(tmp_path), "-d", "0", "-j", "-f")
    details, results = table(tmp_path, "accuracy_checking_details"), table(tmp_path, "accuracy_checking_result")
    assert code in (0, 1), results
    assert tuple(details[0]) == DETAILS_COLUMNS
    names = [r["API Name"] for r in details]
    assert len(set(names)) == len(names)
    order = list(dict.fromkeys(name.rpartition(".output.")[0].rpartition(".")[0] for name in names))
    assert [name.rpartition(".output.")[0].rpartition(".")[0] for name in names] == sorted(
        (name.rpartition(".output.")[0].rpartition(".")[0] for name in names), key=order.index
    ), "the rows of a call are adjacent"
    assert set(order) == {r["API name"] for r in results}
    held = json.loads(Path(info(dump)).read_text())["data"]
    assert {f"{call}.forward" for call in order} == {entry for entry in held if entry.endswith(".forward")}
    found = statuses(results)
    assert found["Functional.linear.0"] == ("pass", "pass") and found["Torch.argmax.0"] == ("pass", " ")
    assert found["Functional.dropout.0"][0] == "pass"


def test_a_wrong_call_is_an_error_and_is_saved_with_a_script_that_runs_it(wrong: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    section = {
        "white_list": ["linear", "softmax", "conv2d"],
        "black_list": ["conv2d"],
        "error_data_path": str(tmp_path / "bad"),
    }
    config.write_text(json.dumps({"task": "run_ut", "run_ut": section}))
    arguments = ("run_ut", "-api_info", info(wrong), "-o", str(tmp_path), "-save_error_data", "-config", str(config))
    assert classic("-f", "pytorch", *arguments) == 2
    found = statuses(table(tmp_path, "accuracy_checking_result"))
    assert {name: forward for name, (forward, _) in found.items()} == {
        "Functional.softmax.0": "pass",
        "Functional.linear.0": "error",
    }
    (script,) = (tmp_path / "bad").glob("ut_error_data*/Functional_linear_0_forward.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "recorded, result 0: bug" in ran.stdout and "cpu, result 0: rounding" in ran.stdout


def test_an_interrupted_run_goes_on_in_its_own_files(dump: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("white_list: [linear]\nblack_list: []\nerror_data_path: './'\nprecision: 5\n")
    assert classic("acc_check", "-api_info", info(dump), "-o", str(tmp_path), "-config", str(config)) == 0
    (result,) = tmp_path.glob("accuracy_checking_result_*.csv")
    first = table(tmp_path, "accuracy_checking_details")
    assert max(len(r["均方根误差"].replace(".", "").lstrip("0").partition("e")[0]) for r in first) <= 5
    assert classic("multi_acc_check", "-n", "2", "-api_info", info(dump), "-csv_path", str(result)) in (0, 1)
    names = [r["API name"] for r in table(tmp_path, "accuracy_checking_result")]
    assert names[0] == "Functional.linear.0" and len(names) == len(set(names)) > 5
    assert table(tmp_path, "accuracy_checking_details")[: len(first)] == first
    renamed = tmp_path / "mine.csv"
    renamed.write_bytes(result.read_bytes())
    assert classic("acc_check", "-api_info", info(dump), "-csv_path", str(renamed)) == 3


def compared(wrong: Path, dump: Path, folder: Path) -> tuple[Path, Path]:
    for side, each in (("npu", wrong), ("gpu", dump)):
        assert main(["op-check", str(each), "-q", "--classic-csv", str(folder / side)]) in (0, 1, 2)
    (a,), (b,) = ((folder / side).glob("accuracy_checking_details_*.csv") for side in ("npu", "gpu"))
    return a, b


def test_two_details_files_are_compared_by_the_assigned_standards(wrong: Path, dump: Path, tmp_path: Path) -> None:
    a, b = compared(wrong, dump, tmp_path)
    assert classic("api_precision_compare", "-npu", str(a), "-gpu", str(b), "-o", str(tmp_path / "out")) == 2
    details = {r["API Name"]: r for r in table(tmp_path / "out", "api_precision_compare_details")}
    assert tuple(next(iter(details.values()))) == PRECISION_COLUMNS
    wanted = {
        "Functional.linear.0.forward.output.0": ("error", "ULP误差比对法"),
        "Torch.conv2d.0.forward.output.0": ("pass", "双千指标法"),
        "Tensor.add.0.forward.output.0": ("pass", "绝对阈值法"),
        "Functional.softmax.0.forward.output.0": ("pass", "标杆比对法"),
        "Torch.argmax.0.forward.output.0": ("pass", "二进制一致法"),
    }
    assert {name: (details[name]["比对结果"], details[name]["比对算法"]) for name in wanted} == wanted
    found = statuses(table(tmp_path / "out", "api_precision_compare_result"))
    assert found["Functional.linear.0"] == ("error", "pass")
    both = main(["op-check", str(wrong), str(dump), "-q", "--classic-csv", str(tmp_path / "both")])
    assert both == 2
    again = {r["API Name"]: r for r in table(tmp_path / "both", "api_precision_compare_details")}
    assert again == details
    lines = b.read_text(encoding="utf-8-sig").splitlines()
    lacking = tmp_path / "lacking.csv"
    lacking.write_text("\n".join(lines[:3]), encoding="utf-8-sig")
    assert classic("api_precision_compare", "-npu", str(b), "-gpu", str(lacking), "-o", str(tmp_path / "part")) == 3
    lacking.write_text("a,b\n1,2\n")
    assert classic("api_precision_compare", "-npu", str(b), "-gpu", str(lacking)) == 3


# run by its own Python: a name and tensors → what its classes make of them; then its command
_THEIRS = """
import importlib, json, sys, torch
from safetensors.torch import load_file
from msprobe.pytorch.api_accuracy_checker.compare.compare_column import CompareColumn
from msprobe.pytorch.api_accuracy_checker.compare.compare_input import CompareInput
folder = "msprobe.pytorch.api_accuracy_checker.precision_standard."
classes = {"absolute_threshold": "AbsolutethdCompare", "benchmark_compare": "BenchmarkCompare", "ulp_compare": "UlpCompare"}
held, found = load_file(sys.argv[1]), {}
for name in {key.partition(".")[0] for key in held}:
    y, r, column = held[name + ".y"], held[name + ".r"], CompareColumn()
    device = (y.float() if y.dtype == torch.bfloat16 else y).numpy()
    for module, kind in classes.items():
        getattr(importlib.import_module(folder + module), kind)(CompareInput(r.numpy(), device, column, y.dtype)).compare()
    found[name] = {key: float(getattr(column, key)) for key in column.__slots__ if not isinstance(getattr(column, key), str)}
print("METRICS", json.dumps(found))
sys.stdout.flush()
from msprobe.msprobe import main
sys.argv = ["msprobe", *sys.argv[2:]]
main()
"""


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Results and references on which the definitions are the same, and those on which its code departs from them."""
    torch.manual_seed(0)
    r = torch.randn(1000, dtype=torch.float64) + 3
    small = torch.full((9,), 3.001e-4)
    return {
        "plain": ((r * (1 + 1e-5 * torch.randn(1000, dtype=torch.float64))).float(), r),
        "bfloat16": (small.bfloat16(), small),
        "float16": (small.half(), small.clone()),
        "infinity": (torch.tensor([1.0, 1.0]), torch.tensor([torch.inf, 1.0], dtype=torch.float64)),
        "nan": (torch.tensor([torch.nan, 1.0]).half(), torch.tensor([1.0, 1.0])),
        "zero": (torch.tensor([1e-10, 1.0]), torch.tensor([0.0, 1.0], dtype=torch.float64)),
    }


@needs_peer
def test_its_own_program_reads_the_details_and_finds_the_same_call(wrong: Path, dump: Path, tmp_path: Path) -> None:
    """mindstudio-probe 26.2.0 judges floats by the benchmark alone, unless a relative error rate is written."""
    a, b = compared(wrong, dump, tmp_path)
    held = {f"{name}.{side}": t for name, both in pairs().items() for side, t in zip("yr", both, strict=True)}
    save_file(held, tmp_path / "pairs.safetensors")
    command = [str(PEER), "-c", _THEIRS, str(tmp_path / "pairs.safetensors"), "api_precision_compare", "-npu", str(a)]
    ran = subprocess.run([*command, "-gpu", str(b), "-o", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    agrees_where_the_definitions_do(json.loads(ran.stdout.partition("METRICS ")[2].splitlines()[0]))
    found = statuses(table(tmp_path / "out", "api_precision_compare_result"))
    ours = statuses(table(a.parent, "accuracy_checking_result"))
    assert set(found) == set(ours), "it drops what it cannot read"
    assert [name for name, (forward, _) in found.items() if forward == "error"] == ["Functional.linear.0"]
    details = {r["API Name"]: r["比对算法"] for r in table(tmp_path / "out", "api_precision_compare_details")}
    assert details["Tensor.add.0.forward.output.0"] == "绝对阈值法"
    assert details["Functional.softmax.0.forward.output.0"] == "标杆比对法"
    assert details["Torch.argmax.0.forward.output.0"] == "二进制一致法"


def agrees_where_the_definitions_do(theirs: dict[str, dict[str, float]]) -> None:
    ours = {name: measure(y, r) for name, (y, r) in pairs().items()}
    same = {
        **{"inf_nan_error_ratio": "not_finite", "rel_err_ratio": "relative_wrong", "abs_err_ratio": "small_wrong"},
        **{"max_rel_error": "largest_relative", "mean_rel_error": "mean_relative", "rmse": "rmse", "eb": "balance"},
        **{"max_ulp_error": "ulp_largest", "mean_ulp_error": "ulp_mean", "ulp_error_proportion": "ulp_share"},
    }
    for theirs_name, name in same.items():
        # its RMSE is a little larger: it multiplies the mean of the squares by 1.0001
        assert theirs["plain"][theirs_name] == pytest.approx(getattr(ours["plain"], name), rel=1e-4), name
    assert (theirs["bfloat16"]["abs_err_ratio"], ours["bfloat16"].small_wrong) == (1.0, 0.0)
    assert (theirs["float16"]["small_value_err_ratio"], ours["float16"].small_wrong) == (1.0, 0.0)
    assert (theirs["infinity"]["inf_nan_error_ratio"], ours["infinity"].not_finite) == (0.0, 1.0)
    assert theirs["nan"]["max_rel_error"] == theirs["nan"]["rmse"] == 0.0 and ours["nan"].not_finite == 1.0
    assert (theirs["zero"]["ulp_error_proportion"], ours["zero"].ulp_share) == (0.0, 0.5)


def test_op_generate_writes_a_script_of_the_call_that_its_config_names(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config_op.json"
    told = {"dump_json_path": info(dump), "api_name": "Functional.linear.0", "propagation": "backward", "iter_times": 3}
    config.write_text(json.dumps(told | {"data_mode": "random_data", "random_seed": 5, "extract_api_path": ""}))
    assert classic("op_generate", "-i", str(config), "-o", str(tmp_path / "out")) == 0
    command = capsys.readouterr().out.split()
    assert command[2:] == ["--random", "--seed", "5", "--repeat", "3"]
    ran = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=True)
    assert "run 2: the same bits as the first" in ran.stdout
    for change, sentence in (
        ({"iter_times": 1001}, "iter_times is 1001"),
        ({"api_name": "softmax"}, "api_name 'softmax' is not a call"),
        ({"propagation": "sideways"}, "forward or backward"),
        ({"api_name": "Functional.gelu.7"}, "has no call of Functional.gelu.7"),
    ):
        config.write_text(json.dumps(told | change))
        assert classic("op_generate", "-i", str(config), "-o", str(tmp_path / "out")) == 3
        assert sentence in capsys.readouterr().err


def test_what_is_misused_is_said(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert classic("run_utt", "-api_info", info(dump)) == 3
    assert "did you mean 'run_ut'" in capsys.readouterr().err
    assert classic("run_ut") == 64
    assert classic("multi_run_ut", "-api_info", info(dump), "-n", "65") == 64
    assert "from 1 to 64" in capsys.readouterr().err
    bad = tmp_path / "config.json"
    for text, sentence in (
        ("[1]", "no object of settings"),
        ('{"run_ut": {"white_list": "linear"}}', "has to be a list"),
        ('{"precision": 99}', "precision is 99"),
        ("{: :", "is no YAML"),
    ):
        bad.write_text(text)
        assert classic("acc_check", "-api_info", info(dump), "-config", str(bad)) == 3
        assert sentence in capsys.readouterr().err


def test_a_classic_config_limits_what_op_check_judges(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"acc_check": {"white_list": [], "black_list": ["conv2d", "dropout"]}}')
    assert main(["op-check", str(dump), "--config", str(config), "--skip", "argmax", "--csv", str(tmp_path / "o.csv")]) in (
        0,
        1,
    )
    with (tmp_path / "o.csv").open() as file:
        judged = {row["operator"] for row in csv.DictReader(file)}
    assert "Functional.linear" in judged and not judged & {"Torch.conv2d", "Functional.dropout", "Torch.argmax"}
