"""What may be wrong with a run, from what it left on disk: real runs, against what was planted in them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.again.why.against import CONFIGURATION, DATA, OPERATION, STEP, WEIGHTS
from trainprobe.again.why.causes import MOST, ranked
from trainprobe.again.why.why import answer, left_by
from trainprobe.cli import main
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.errors import FormatError

LOG: dict[str, Any] = {"level": "off", "monitor": True, "audit": True, "console": False}
DUMP: dict[str, Any] = {"level": "L0", "summary": "both", "sinks": ["dump", "parquet"], "monitor": True, "console": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def train(folder: Path, planted: str = "", steps: int = 4, plan: dict[str, Any] = DUMP) -> Path:
    torch.manual_seed(1 if planted == "weights" else 0)
    net = Net()
    if planted == "operation":
        net.act = torch.relu
    net.first.requires_grad_(planted != "frozen")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = torch.Generator().manual_seed(8 if planted == "data" else 7)
    with trainprobe.watch(net, optimizer, {**plan, "output": folder}) as probe:
        for step in range(steps):
            if planted == "rate" and step == steps - 2:
                optimizer.param_groups[0]["lr"] = 100.0
            if planted == "written" and step == steps // 2:
                with torch.no_grad():
                    net.last.weight.mul_(20)
            with probe.step():
                x = torch.randn(6, 8, generator=data)
                loss = (net(x) - x[:, :4]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("lr", optimizer.param_groups[0]["lr"])
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("good") / "run")


@pytest.mark.parametrize(
    ("planted", "first", "words"),
    [
        ("weights", WEIGHTS, "last.bias value norm is another"),
        ("data", DATA, "Module.root.Net.forward.0 (step 0, micro-batch 0, rank 0): it is given something else"),
        ("operation", OPERATION, "Module.root.Net.forward.0, which it runs within, is given the same: it arises there"),
        ("rate", STEP, "from step 2 on, lr is another"),
    ],
)
def test_the_first_place_that_differs_from_a_good_run_is_named(
    good: Path, tmp_path: Path, planted: str, first: str, words: str
) -> None:
    causes, _ = answer(left_by(train(tmp_path / "run", planted)), good)
    assert causes[0].what == first
    assert words in causes[0].sentence
    assert "trainprobe " in causes[0].next
    assert len(causes) <= MOST


def test_settings_come_before_what_follows_from_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CONFIGURED)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    causes, _ = answer(left_by(tmp_path / "0.2"), tmp_path / "0.1")
    assert causes[0].what == CONFIGURATION
    assert "0.2" in causes[0].sentence
    assert any("what follows" in line for line in causes[0].evidence)


# two processes that have imported torch once: what is set before them is captured in each
CONFIGURED = """
import os, sys, torch, trainprobe
for rate in (0.1, 0.2):
    if os.fork():
        os.wait()
        continue
    plan = {"level": "off", "monitor": True, "console": False, "output": f"{sys.argv[1]}/{rate}", "config_check": True}
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with trainprobe.watch(model, optimizer, plan) as probe:
        for _ in range(3):
            with probe.step():
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    sys.exit()
"""


def test_saved_states_are_compared_up_to_the_first_that_differs(tmp_path: Path) -> None:
    for name in ("good", "run"):
        train(tmp_path / name, plan=LOG)
        for step in (2, 10):
            w = torch.ones(3) * (1 + (name == "run" and step == 10))
            torch.save({"model": {"w": w}}, tmp_path / name / f"model{step}.pt")
    causes, _ = answer(left_by(tmp_path / "run"), tmp_path / "good")
    assert causes[0].what == STEP
    assert causes[0].sentence.startswith("model10.pt: ")
    assert causes[0].evidence[0] == "model2.pt is the same in both"


def test_a_run_that_is_the_same_has_no_cause(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = train(tmp_path / "run")
    assert main(["why", str(again), "--against", str(good)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing found: 4 steps of 1 rank")
    assert "the same in both, as far as both hold them: series" in said
    assert "the same in both, as far as both hold them: dumps" in said
    assert "not compared: settings, which not both runs have" in said


def test_series_that_one_run_alone_has_are_said(tmp_path: Path) -> None:
    """A layer that was frozen by mistake has no gradients."""
    runs = [train(tmp_path / name, planted, plan=LOG) for name, planted in (("good", ""), ("run", "frozen"))]
    causes, _ = answer(left_by(runs[1]), runs[0])
    assert causes[0].what == STEP
    assert "it is the first step of both" in causes[0].evidence
    assert any(
        line.startswith(f"not compared, as {runs[0]} alone has them: ") and "first." in line for line in causes[0].evidence
    )


def test_a_run_alone_is_told_by_exact_evidence_first(tmp_path: Path) -> None:
    causes, _ = answer(left_by(train(tmp_path / "run", "written", steps=30, plan={**LOG, "audit": {"every": 1}})))
    assert causes[0].what == "untouched_between_steps"
    assert causes[0].step == 15
    assert any(line.startswith("the loss: median") for line in causes[0].evidence)


def found(rule: str, step: int, name: str = "w", **more: Any) -> Finding:
    return Finding(rule, "warning", f"{rule} of {name}", step, Place(0), Site("parameter", name, "value"), **more)


def test_symptoms_follow_and_what_came_before_speaks_against() -> None:
    causes = ranked([found("spike", 3, "early"), found("replicas", 20), found("spike", 22), found("drift", 90)], "run")
    assert [(cause.what, cause.step) for cause in causes] == [("replicas", 20), ("spike", 3), ("drift", 90)]
    assert causes[0].evidence[-1] == "then: spike of w (step 22, rank 0)"
    assert causes[0].against == ["before it was seen: spike of early (step 3, rank 0)"]


def test_what_a_relation_says_to_do_is_not_followed_by_a_dump_that_shows_nothing_of_it() -> None:
    causes = ranked([found("learning_rate", 3, next="step the scheduler once"), found("spike", 90, next="look there")], "run")
    assert causes[0].next == "step the scheduler once"
    assert (
        causes[1].next
        == "look there; record the step whole: `{record: mix, summary: both, step: [90]}`, then `trainprobe show`"
    )


def test_what_a_nan_breaks_later_is_no_cause_of_it() -> None:
    causes = ranked([found("nonfinite", 5), found("replicas", 20)], "run")
    assert [cause.what for cause in causes] == ["nonfinite", "replicas"]
    assert "from step 5 on" in causes[1].against[-1]


def test_what_the_good_run_has_too_is_no_cause() -> None:
    assert ranked([found("replicas", 2)], "run", [found("replicas", 5)]) == []


def test_a_killed_process_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    assert subprocess.run([sys.executable, str(script), str(tmp_path / "run")], check=False).returncode == -signal.SIGKILL
    causes, _ = answer(left_by(tmp_path / "run"))
    assert causes[0].sentence == "the process was ended from outside in step 2"
    assert "trainprobe black-box" in causes[0].next


KILLED = """
import os, signal, sys, torch, trainprobe
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
plan = {"level": "off", "monitor": True, "black_box": True, "console": False, "output": sys.argv[1]}
with trainprobe.watch(model, optimizer, plan) as probe:
    for step in range(4):
        with probe.step():
            model(torch.ones(2, 4)).sum().backward()
            if step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
"""


def test_a_folder_without_a_run_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        left_by(tmp_path)


def test_a_large_log_is_not_judged_again_and_says_so(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    shutil.copytree(good, folder)
    monkeypatch.setattr("trainprobe.again.why.why.LARGEST_LOG", 10)
    assert main(["why", str(folder), "--json", str(tmp_path / "answer.json")]) == 3
    told = orjson.loads((tmp_path / "answer.json").read_bytes())
    assert told["causes"] == []
    assert "was not judged again: `trainprobe judge --fleet" in told["notes"][0]
