"""`trainprobe op-check` over dumps of real trainings: healthy ones, and with one stored number changed."""

from __future__ import annotations

import csv
import json
import re
import resource
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.numpy import load_file, save_file
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.op_check.dump import DumpChecked, check_dump, rank_folders


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.wide, self.head = nn.Linear(16, 32), nn.Linear(32, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.wide(self.norm(self.embed(x))), approximate="tanh").view(2, 6, 4, 8).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).reshape(2, 6, 32)
        return self.head(h + 0.0 * torch.zeros_like(h))


def recorded(folder: Path, **plan: Any) -> Path:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randint(0, 20, (2, 6))
    with (
        trainprobe.watch(model, optimizer, level="mix", step=[0], output=str(folder), console=False, **plan) as probe,
        probe.step(),
    ):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("healthy"), task="tensor")


def outcomes(found: DumpChecked) -> dict[str, str]:
    return {row.entry: row.worst.outcome for row in found.rows}


def spoiled(dump: Path, folder: Path, key: str, change: Any) -> Path:
    """Return a copy of the dump in which a stored value is another."""
    at = folder / "step0" / "rank0"
    at.mkdir(parents=True)
    for path in (dump / "step0" / "rank0").iterdir():
        (at / path.name).write_bytes(path.read_bytes())
    tensors = {name: array.copy() for name, array in load_file(at / "tensors.safetensors").items()}
    tensors[key] = np.asarray(change(tensors[key]), tensors[key].dtype)
    save_file(tensors, at / "tensors.safetensors")
    return folder


def test_a_healthy_training_has_no_finding(dump: Path) -> None:
    found = check_dump(rank_folders(dump))
    assert len(found.rows) > 60
    assert {row.worst.outcome for row in found.rows} <= {"exact", "rounding"}, [
        (row.entry, row.worst) for row in found.rows if row.worst.outcome not in ("exact", "rounding")
    ]
    weights = next(row for row in found.rows if row.entry == "Module.head.Linear.backward.0")
    assert sum(judgement.count for judgement in weights.checked.judgements) == 32 * 20 + 20 + 12 * 32  # weight, bias, input
    assert next(row for row in found.rows if row.entry == "Tensor.addcdiv_.0.forward").module == "optimizer"
    assert sum(row.equal for row in found.rows) > 0, "the counters of the optimizer are equal calls"


def test_ranks_that_are_judged_elsewhere_have_as_many_threads_as_asked(dump: Path, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))

    def threads(*_: Any) -> list[int]:
        return [torch.get_num_threads()]

    def run(function: Any, tasks: Any, each: int) -> Any:
        return map(function, tasks)

    found = check_dump(rank_folders(dump), ["gelu"], measure=threads, run=run, threads=before + 1)
    assert [row.measured for row in found.rows] == [[before + 1]] * 2


def test_several_steps_are_judged_at_once_with_the_answer_of_one_process(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    for step in (0, 1):
        shutil.copytree(dump / "step0", tmp_path / "several" / f"step{step}")
    said: dict[int, str] = {}
    in_children: dict[int, float] = {}
    for threads in (1, 2):
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        arguments = ["--threads", str(threads), "--json", str(tmp_path / f"{threads}.json")]
        main(["op-check", str(tmp_path / "several"), *arguments])
        in_children[threads] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
        said[threads] = capsys.readouterr().out
    assert said[1] == said[2]
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()
    assert in_children[1] < 0.1 < in_children[2]


def test_a_changed_number_is_found_where_it_is(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        x[1, 3, 7] *= 1.001
        return x

    bad = spoiled(dump, tmp_path / "bad", "Functional.gelu.0.forward.output", change)
    assert (
        main(["op-check", str(bad), "--op", "gelu", "--csv", str(tmp_path / "o.csv"), "--json", str(tmp_path / "o.json")]) == 2
    )
    said = capsys.readouterr().out
    assert said.startswith("step 0, rank 0: Functional.gelu.0.forward in root is a bug: ")
    assert "at [1, 3, 7]" in said.splitlines()[0].replace("\n", "")
    rows = list(csv.DictReader((tmp_path / "o.csv").open(encoding="utf-8")))
    assert next((r["entry"], r["verdict"]) for r in rows) == ("Functional.gelu.0.forward", "bug")
    assert json.loads((tmp_path / "o.json").read_text())["code"] == 2


def test_the_other_approximation_is_named_as_the_cause(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(dump / "step0" / "rank0" / "tensors.safetensors")
    other = F.gelu(torch.from_numpy(tensors["Functional.linear.0.forward.output"])).numpy()
    bad = spoiled(dump, tmp_path / "bad", "Functional.gelu.0.forward.output", lambda _: other)
    assert main(["op-check", str(bad), "--op", "Functional.gelu.0.forward", "-q"]) == 2
    assert "it is what comes out with approximate='none'" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["Functional.layer_norm.0.forward", "Functional.scaled_dot_product_attention.0.backward"])
def test_the_replay_prints_the_same_verdict(
    dump: Path, tmp_path: Path, entry: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    direction = entry.rpartition(".")[2]
    key = f"{entry}.output" + (".1" if direction == "backward" else "")
    bad = spoiled(dump, tmp_path / "bad", key, lambda x: x * 1.01)
    assert main(["op-check", str(bad), "--op", entry, "--replay", str(tmp_path / "replay")]) == 2
    verdict = capsys.readouterr().out.partition(" is a bug: ")[2].partition(" times")[0]
    script = next((tmp_path / "replay").glob("*.py"))
    imported = re.findall(r"^(?:import|from) (\w+)", script.read_text(encoding="utf-8"), re.M)
    assert set(imported) - sys.stdlib_module_names == {"torch"}
    monkeypatch.setattr(sys, "argv", [str(script), "--repeat", "2"])
    runpy.run_path(str(script))
    ran = capsys.readouterr().out
    result = 1 if direction == "backward" else 0
    assert f"recorded, result {result}: bug: {verdict} times" in ran
    assert f"cpu, result {result}: rounding" in ran or f"cpu, result {result}: exact" in ran
    assert "the same bits as the first" in ran


def test_equal_inputs_with_unequal_outputs_are_a_finding(dump: Path, tmp_path: Path) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        return np.nextafter(x, np.inf, dtype=x.dtype)

    text = (dump / "step0" / "rank0" / "dump.json").read_text(encoding="utf-8")
    data = json.loads(text)["data"]
    again = [name for name in data if name.startswith("Tensor.add_.") and data[name]["input_args"][0]["shape"] == []]
    key = data[again[1]]["output"][0]["data_name"]
    found = check_dump(rank_folders(spoiled(dump, tmp_path / "bad", key, change)))
    row = next(row for row in found.rows if row.entry == again[1])
    assert row.same_inputs == again[0]
    assert row.worst.outcome == "bug" or row.worst.outcome == "rounding"


def test_two_dumps_say_which_is_nearer(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = spoiled(dump, tmp_path / "bad", "Functional.gelu.0.forward.output", lambda x: x * 1.01)
    assert main(["op-check", str(dump), str(bad), "--op", "gelu"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("B, step 0, rank 0: Functional.gelu.0.forward in root is a bug")
    assert "Functional.gelu.0.forward in root: A is nearer the truth" in said


def test_statistics_alone_judge_this_machine_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["op-check", str(recorded(tmp_path, task="statistics")), "--op", "linear", "--op", "embedding"]) in (0, 3)
    said = capsys.readouterr().out
    assert "inputs were made, and this machine's operators were judged" in said
    assert "bug" not in said


def test_what_replaces_a_function_afterwards_is_no_reference(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainprobe.op_check.functions

    assert trainprobe.op_check.functions.function("Functional.linear") is F.linear
    monkeypatch.setattr(F, "gelu", lambda x, **_: x * 0)
    monkeypatch.setattr(F, "linear", lambda x, *_: x * 0)
    monkeypatch.setattr(torch, "exp", lambda x: x * 0)
    monkeypatch.setattr(torch.Tensor, "addcdiv_", lambda x, *_, **__: x * 0)
    found = check_dump(rank_folders(dump), ["gelu", "linear", "cross_entropy", "addcdiv"])
    assert {row.worst.outcome for row in found.rows} <= {"exact", "rounding"}


def test_without_torch_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["op-check", "anywhere"]) == 3
    assert "judging operators needs torch, which is not installed: pip install 'trainprobe[torch]'" in capsys.readouterr().err


def test_a_name_that_is_not_there_is_an_error(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["op-check", str(dump), "--op", "conv2d"]) == 3
    assert "has no call of conv2d" in capsys.readouterr().err
    assert main(["op-check", str(tmp_path)]) == 3
    assert "no dump at" in capsys.readouterr().err
