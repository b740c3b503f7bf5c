"""What stood in the way of a training once: an odd module, a file that never ends, no descriptors, packs of two runs."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
import weakref
import zipfile
from pathlib import Path

import orjson
import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.merge import merge_ranks
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.control import ControlFile
from trainprobe.engine.plan.file import read_plan_file
from trainprobe.errors import FormatError, PlanError
from trainprobe.run.probe import Probe


class Distilled(nn.Module):
    """A student with a frozen TorchScript teacher inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.teacher = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.student(x)) - self.teacher(x)).square().mean()


def trained(model: nn.Module, folder: Path, steps: int = 2, **plan) -> Probe:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with trainprobe.watch(model, optimizer, output=folder, console=False, **plan) as probe:
        for _ in range(steps):
            with probe.step():
                model(torch.ones(2, 8)).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            model(torch.ones(2, 8))
            model.train()
    return probe


@pytest.mark.parametrize("plan", [{"audit": True, "monitor": True}, {"config_check": True}, {"level": "mix"}], ids=str)
def test_a_frozen_torchscript_module_may_be_called(tmp_path, plan):
    """Case c05."""
    probe = trained(Distilled(), tmp_path / "out", **{"level": "off", **plan})
    assert probe.guard.tripped is None and [f for f in probe.findings if f.rule in ("guard", "probe")] == []


def bomb(depth: int) -> str:
    """Return a few hundred bytes of merge keys that stand for 9 ** depth entries."""
    again = (f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, depth))
    return "a0: &a0 {x0: 1, y0: 2}\n" + "".join(again)


def test_merge_keys_that_never_end_are_refused_at_once(tmp_path, capsys):
    """Case c06."""
    (tmp_path / "bomb.yaml").write_text(bomb(12))
    (tmp_path / "good.yaml").write_text("monitor: &m {actions: {}}\naudit: {every: 3}\n")
    began = time.process_time()
    assert main(["plan", str(tmp_path / "bomb.yaml")]) == 3
    for command in (["judge", str(tmp_path), "--rules"], ["dump-compare", "a", "b", "--mapping"]):
        assert main([*command, str(tmp_path / "bomb.yaml")]) == 3
    assert main(["config-check", "collect", "--scripts", str(tmp_path / "bomb.yaml"), "-o", str(tmp_path / "p.zip")]) == 3
    assert time.process_time() - began < 10 and "anchors expand to more than" in capsys.readouterr().err
    assert read_plan_file(tmp_path / "good.yaml")["audit"] == {"every": 3}
    merged = "a: &a {x: 1}\nb: {<<: *a, y: 2}\n"  # its healthy twin
    assert read_plan_file(tmp_path / "good.yaml", merged)["b"] == {"x": 1, "y": 2}


def test_a_control_file_that_never_ends_changes_nothing(tmp_path):
    (tmp_path / "control.yaml").write_text(bomb(12))
    control = ControlFile(tmp_path, 1, 0, lambda payload: [payload])
    with pytest.raises(PlanError, match="anchors expand"):
        control.look(1)


WITHOUT_DESCRIPTORS = """
import os, resource, sys, torch, trainprobe
model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True: held.append(os.open(os.devnull, os.O_RDONLY))
except OSError: pass
for _ in range(int(sys.argv[2])): os.close(held.pop())
with trainprobe.watch(model, optimizer, output=sys.argv[1], monitor=True, on_error="continue") as probe:
    for _ in range(2):
        with probe.step():
            probe.note("loss", 1.0)
            model(torch.ones(2, 8)).sum().backward(); optimizer.step()
print("went on")
"""


@pytest.mark.parametrize("left", [0, 2])
def test_a_training_without_file_descriptors_goes_on(tmp_path, left):
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path / "out"), str(left)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr[-2000:]
    assert left or "nothing is watched, the training goes on" in ran.stderr


def test_five_watches_keep_no_model_and_no_probe(tmp_path):
    kept: list[weakref.ref[object]] = []
    for number in range(5):
        model = Distilled()
        kept += [weakref.ref(trained(model, tmp_path / str(number), audit=True, monitor=True, level="off")), weakref.ref(model)]
    del model
    gc.collect()
    assert [type(x).__name__ for ref in kept if (x := ref()) is not None] == []


def test_a_pack_is_written_whatever_the_clock_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setattr(time, "time", lambda: 0.0)  # 1970: a zip holds no date before 1980
    writer = PackWriter(tmp_path / "pack.zip")
    writer.put("environment", {"variables": {"X": "1"}})
    writer.put("packages", lambda: 1 / 0)
    writer.close()
    pack = read_pack(tmp_path / "pack.zip")
    assert pack.ranks[0].single["environment"] == {"variables": {"X": "1"}} and "ZeroDivisionError" in pack.notes[0]


def test_two_packs_of_one_rank_are_not_merged_and_stay(tmp_path):
    for rank in range(2):
        writer = PackWriter(tmp_path / "m.zip", rank, 2)
        writer.put("environment", {"variables": {"X": str(rank)}})
        writer.close()
    zero, one = tmp_path / "m.rank0.zip", tmp_path / "m.rank1.zip"
    good = one.read_bytes()
    one.write_bytes(zero.read_bytes())
    with pytest.raises(FormatError, match="rank 0 stands in more than one pack"):
        merge_ranks(tmp_path / "m.zip")
    assert zero.exists() and one.exists() and not (tmp_path / "m.zip").exists()
    one.write_bytes(good)
    assert merge_ranks(tmp_path / "m.zip") == [] and not zero.exists()


def test_a_short_value_of_the_environment_cannot_be_guessed_from_a_pack():
    told = orjson.dumps(capture_environment({"EDITOR": "vi", "NCCL_ALGO": "Ring"}))
    assert orjson.loads(told)["others"] == {"EDITOR": ""} and b"Ring" in told


def test_a_module_whose_name_holds_a_newline_is_there(tmp_path):
    model = nn.Sequential()
    for name in ("a\nb", "\r=cmd"):
        model.add_module(name, nn.Linear(8, 8))
    model.add_module("last", nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    output = tmp_path / "out"
    plan = {"level": "L0", "sinks": ["dump", "csv"], "console": False}
    with trainprobe.watch(model, optimizer, output=output, **plan) as probe, probe.step():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    entries = orjson.loads((output / "step0" / "rank0" / "dump.json").read_bytes())["data"]
    assert {rf"Module.{name}.Linear.forward.0" for name in (r"a\nb", r"\r=cmd", "last")} <= entries.keys()
    assert re.search(r"\\r=cmd", (output / "rank0" / "metrics.csv").read_text())


def test_what_a_run_writes_is_for_this_user_alone(tmp_path):
    model, output = nn.Linear(8, 1), tmp_path / "out"
    plan = {"level": "L0", "task": "tensor", "sinks": ["dump", "jsonl", "parquet", "csv"], "monitor": True}
    with trainprobe.watch(model, output=output, console=False, **plan) as probe, probe.step():
        model(torch.ones(2, 8)).sum().backward()
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) > 4 and {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert output.stat().st_mode & 0o777 == 0o700


def test_a_flipped_byte_of_a_log_costs_that_line_and_is_told(tmp_path, capsys):
    model, output = nn.Linear(8, 1), tmp_path / "out"
    with trainprobe.watch(model, output=output, level="off", sinks=["jsonl"], monitor=True, console=False) as probe:
        for _ in range(3):
            with probe.step():
                model(torch.ones(2, 8)).sum().backward()
    log = output / "rank0" / "records.jsonl"
    lines = log.read_bytes().split(b"\n")
    assert main(["judge", str(output)]) == 0
    log.write_bytes(b"\n".join([lines[0], b"\x80" + lines[1][1:], *lines[2:]]))
    capsys.readouterr()
    assert main(["judge", str(output)]) == 3
    said = capsys.readouterr()
    assert "2 steps of 1 rank" in said.out and f"{log}, line 2, is left out" in said.err
    for command in (["runs"], ["top", "--once"], ["report", "-o", str(tmp_path / "page.html")]):
        assert main([command[0], str(output), *command[1:]]) == 3
        assert "Traceback" not in capsys.readouterr().err


def rewritten(source: Path, target: Path, change) -> Path:
    """Write an archive again, with what `change` makes of its members' names and contents."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name, content in change([(info.filename, old.read(info)) for info in old.infolist()]):
            new.writestr(zipfile.ZipInfo(name), content)
    return target


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_can_be_read_in_two_ways_is_not_identical(tmp_path, capsys):
    good = tmp_path / "good.pt"
    torch.save({"w": torch.arange(6.0)}, good)
    same = rewritten(good, tmp_path / "same.pt", lambda members: members)
    two = rewritten(good, tmp_path / "two.pt", lambda members: [*members, ("other/data.pkl", members[0][1])])
    twice = rewritten(good, tmp_path / "twice.pt", lambda members: members + [m for m in members if "/data/" in m[0]])
    long = rewritten(good, tmp_path / "long.pt", lambda ms: [(n, c + bytes(8)) if "/data/" in n else (n, c) for n, c in ms])
    codes = [main(["ckpt-compare", str(good), str(other), "-q"]) for other in (same, two, twice, long)]
    assert codes == [0, 3, 3, 3] and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("file", ["records.jsonl", "findings.jsonl"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, file, capsys):
    (tmp_path / "rank0").mkdir()
    os.mkfifo(tmp_path / "rank0" / file)
    assert main(["judge", str(tmp_path)]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_job_of_a_million_million_ranks_is_no_place():
    from trainprobe.engine.storage.dumps.header import read_place

    with pytest.raises(ValueError, match="no place in a job"):
        read_place({"rank": 0, "world_size": 10**12})
    assert read_place({"rank": 3, "world_size": 4}) == Place(3, 4)
