"""No command calls healthy what it could not look at: of nothing, of a torn file, of a part that cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import trainprobe
from tests.config_check.made_packs import written
from tests.kernel_dumps.kernel_files import shape, varint, write_kernel
from trainprobe import SingleSave
from trainprobe.cli import main
from trainprobe.op_check.check import Checked
from trainprobe.op_check.conclusion import conclude
from trainprobe.op_check.dump import DumpChecked, Row
from trainprobe.op_check.judge import Judgement

Case = tuple[str, str, Callable[[Path, Path, Path], list[str]]]


def of_run(*words: str) -> Callable[[Path, Path, Path], list[str]]:
    """The command reads one folder."""
    return lambda _whole, damaged, _out: [words[0], str(damaged), *words[1:]]


def of_two(*words: str, output: str = "") -> Callable[[Path, Path, Path], list[str]]:
    """The command compares a folder with its damaged copy."""
    return lambda whole, damaged, out: [*words, str(whole), str(damaged), *([output, str(out)] if output else [])]


COMMANDS: list[Case] = [
    *(
        (name, material, of_run(*words))
        for material in ("table", "lines", "dumps")
        for name, words in (
            ("judge", ("judge",)),
            ("report", ("report",)),
            ("top", ("top", "--once")),
            ("nan-trace", ("nan-trace",)),
        )
    ),
    *(
        ("export", material, lambda _whole, damaged, out: ["export", str(damaged), "--trend", f"{out}.trend.db"])
        for material in ("table", "lines", "dumps")
    ),
    ("csv2tb", "csv", lambda _whole, damaged, out: ["csv2tb", str(damaged), "-o", str(out)]),
    ("runs", "table", of_run("runs")),
    ("judge --fleet", "table", of_run("judge", "--fleet")),
    ("report --fleet", "table", of_run("report", "--fleet")),
    ("nan-trace", "kernels", of_run("nan-trace")),
    ("kernel-dump convert", "kernels", lambda _whole, damaged, out: ["kernel-dump", "convert", str(damaged), "-o", str(out)]),
    ("op-check", "dumps", of_run("op-check")),
    ("dump-compare", "dumps", of_two("dump-compare")),
    ("dump-compare", "kernels", lambda _whole, damaged, _out: ["dump-compare", str(damaged), str(damaged)]),
    *(
        ("show", material, lambda _whole, damaged, out: ["show", str(damaged), "-o", str(out)])
        for material in ("dumps", "kernels")
    ),
    ("ckpt-compare", "checkpoint", of_two("ckpt-compare")),
    ("ckpt-show --check", "checkpoint", of_run("ckpt-show", "--check")),
    ("config-check compare", "pack", of_two("config-check", "compare", output="-o")),
    ("rollout-compare", "rollout", of_two("rollout-compare", output="-o")),
]


def train(folder: Path, steps: range, **fields) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = {"console": False, "on_existing": "continue", **fields}
    with trainprobe.watch(model, optimizer, plan, output=folder) as probe:
        for step in steps:
            with probe.step(step):
                optimizer.zero_grad()
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def make(material: str, folder: Path) -> None:
    if material in SINKS:
        for steps in (range(6), range(6, 12)):
            train(folder, steps, level="off", monitor=True, sinks=[SINKS[material]])
    elif material == "dumps":
        train(folder, range(3), level="L1", task="tensor", sinks=["dump"])
    elif material == "kernels":
        for task, time in ((1, 1700000000000000), (2, 1700000000000001)):
            write_kernel(
                folder, "MatMul.net_MatMul", [np.ones((2, 3), np.float32)], [np.ones(3, np.float32)], task=task, time=time
            )
    elif material == "checkpoint":
        from safetensors.torch import save_file

        folder.mkdir()
        save_file({"a.weight": torch.randn(8, 8), "b.weight": torch.randn(64, 8)}, folder / "model.safetensors")
    elif material == "pack":
        folder.mkdir()
        written(folder, packages={"distributions": {"torch": "2.13.0"}, "platform": {}, "code": {}})
    else:
        SingleSave(folder)
        for _ in range(2):
            SingleSave.save({"log_prob": torch.randn(2, 5), "reward": torch.randn(6)})
            SingleSave.step()
        SingleSave.close()


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / name
            make(name, made[name])
        return made[name]

    return get


SINKS = {"table": "parquet", "lines": "jsonl", "csv": "csv"}
PARTS = {  # the files that hold what a command looks at
    "table": "metrics-*.parquet",
    "lines": "records.jsonl",
    "csv": "*.csv",
    "dumps": "*.safetensors",
    "kernels": "MatMul*",
    "checkpoint": "*.safetensors",
    "pack": "*.zip",
    "rollout": "*.npy",
}
JSON = {"judge", "report", "top", "nan-trace", "export", "show"}  # of a dump these read the statistics in dump.json


def parts(name: str, material: str, folder: Path) -> list[Path]:
    pattern = "dump.json" if material == "dumps" and name in JSON else PARTS[material]
    found = sorted(folder.rglob(pattern))
    assert found
    return found


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def argued(name: str, material: str, whole: Path, damaged: Path, out: Path) -> list[str]:
    """The arguments of a command; a pack is one file."""
    make = next(make for n, m, make in COMMANDS if (n, m) == (name, material))
    if material == "pack":
        return make(whole / "pack.zip", damaged / "pack.zip", out)
    return make(whole, damaged, out)


NAMES = [(name, material) for name, material, _ in COMMANDS]


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_the_whole_input_is_healthy(name, kind, material, tmp_path, capsys):
    whole = material(kind)
    code = main(argued(name, kind, whole, shutil.copytree(whole, tmp_path / "copy"), tmp_path / "out"))
    alone = {"judge --fleet", "report --fleet"}  # one rank has no replica
    allowed = {3} if name in alone else {0, 3} if name == "op-check" else {0}
    assert code in allowed, capsys.readouterr()


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_an_empty_folder_is_no_answer(name, kind, material, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main(argued(name, kind, material(kind), tmp_path / "empty", tmp_path / "out")) == 3


@pytest.mark.parametrize("damage", [emptied, torn])
@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_what_is_cut_off_is_never_healthy(name, kind, damage, material, tmp_path, capsys):
    damaged = shutil.copytree(material(kind), tmp_path / "damaged")
    for path in parts(name, kind, damaged):
        damage(path)
    assert main(argued(name, kind, material(kind), damaged, tmp_path / "out")) == 3, capsys.readouterr()


@pytest.mark.parametrize(("name", "kind"), [pair for pair in NAMES if pair[1] not in ("checkpoint", "pack")])
def test_one_part_that_cannot_be_read_is_told(name, kind, material, tmp_path, capsys):
    """The last of several files is torn. A command may know enough to say more than that, and never says healthy."""
    damaged = shutil.copytree(material(kind), tmp_path / "damaged")
    torn(parts(name, kind, damaged)[-1])
    code = main(argued(name, kind, material(kind), damaged, tmp_path / "out"))
    said = capsys.readouterr()
    assert code in ({1, 3} if name in ("judge --fleet", "report --fleet", "kernel-dump convert") else {3}), said


def test_a_kernel_dump_of_which_no_tensor_can_be_read_is_not_finite(tmp_path, capsys):
    """The only tensor has a number format that is not known: its bytes are NaN, and nobody can tell. Case c07."""

    def field(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    told = field(
        4, varint(1 << 3) + varint(99) + varint(2 << 3) + varint(2) + field(3, shape((2, 3))) + varint(5 << 3) + varint(24)
    )
    head = field(1, b"2.0") + told
    dump = tmp_path / "MatMul.net_MatMul.1.2.1700000000000000"
    dump.write_bytes(len(head).to_bytes(8, "little") + head + np.full(6, np.nan, np.float32).tobytes())
    assert main(["nan-trace", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert said.startswith("no value could be looked at: whether there is a NaN or an infinity is not known\n")
    assert "\n1 part of the dump could not be read, such as: " in said
    assert main(["kernel-dump", "convert", str(tmp_path), "-o", str(tmp_path / "out")]) == 3
    assert "not written: " in capsys.readouterr().out


def _dump(folder: Path, entries: dict[str, object]) -> None:
    rank = folder / "step0" / "rank0"
    rank.mkdir(parents=True)
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**head, "data": entries}))


def test_what_holds_no_element_is_not_healthy(tmp_path, capsys):
    from safetensors.torch import save_file

    folder, keys = tmp_path / "dump", tmp_path / "keys" / "data" / "k" / "step0" / "rank0"
    _dump(folder, {"Torch.a.0.forward": {"input_args": [None], "input_kwargs": {}, "output": [None]}})
    save_file({}, tmp_path / "none.safetensors")
    save_file({"a.weight": torch.zeros(0, 4)}, tmp_path / "empty.safetensors")
    keys.mkdir(parents=True)
    np.save(keys / "k.npy", np.zeros((0, 3), np.float32))
    (tmp_path / "loss.csv").write_text("step,loss\n")
    for words in (
        ["dump-compare", folder, folder],
        ["ckpt-compare", tmp_path / "empty.safetensors", tmp_path / "empty.safetensors"],
        ["ckpt-show", "--check", tmp_path / "empty.safetensors"],
        ["ckpt-show", "--check", tmp_path / "none.safetensors"],
        ["rollout-compare", tmp_path / "keys", tmp_path / "keys", "-o", tmp_path / "out"],
        ["report", tmp_path / "loss.csv", "-o", tmp_path / "report.html"],
    ):
        assert main([*map(str, words)]) == 3, (words, capsys.readouterr())


def test_a_page_of_values_without_numbers_does_not_call_them_finite(tmp_path):
    value = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], **dict.fromkeys(("Max", "Min", "Mean", "Norm"))}
    _dump(tmp_path / "dump", {"Torch.a.0.forward": {"input_args": [], "input_kwargs": {}, "output": [value]}})
    assert main(["show", str(tmp_path / "dump"), "-o", str(tmp_path / "page.html")]) == 0
    assert "all numbers are finite" not in (tmp_path / "page.html").read_text()


def test_rules_that_could_judge_no_step_do_not_find_nothing(material, capsys):
    """Twelve steps are too few for the rule `spike`."""
    assert main(["judge", str(material("table")), "--rules", "spike"]) == 3
    assert capsys.readouterr().out.startswith("nothing of this run was judged")


def test_an_op_check_of_calls_without_a_specified_result_is_no_answer():
    calls = [Checked("forward", [Judgement("unspecified", "memory that nobody has written yet")], "properties")] * 2
    rows = [Row(0, 0, f"Torch.empty.{i}", "empty", "", checked) for i, checked in enumerate(calls)]
    found = conclude(DumpChecked(rows))
    assert (found.code, "is right within" in found.sentence) == (3, False)


def test_a_parity_of_scripts_that_train_nothing_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["parity", "-l", "one=1", "-l", "other=1", "--launcher", "env", "--", "train.py"]
    assert main(words) == 3
