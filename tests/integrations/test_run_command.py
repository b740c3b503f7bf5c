"""`trainprobe run`: where it writes, and which run a training that is resumed goes on with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integrations.records import recorded
from trainprobe.cli import main
from trainprobe.integrations import auto_attach, output_folder, torch_loop

Start = Callable[..., dict[str, str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Return what gives `trainprobe run` words, and returns its program's variables and command instead of starting it."""
    monkeypatch.chdir(tmp_path)
    for name in run_names():
        monkeypatch.delenv(name, raising=False)

    def go(*words: str) -> dict[str, str]:
        started: list[tuple[list[str], dict[str, str]]] = []
        monkeypatch.setattr(os, "execvpe", lambda _, command, environment: started.append((command, environment)))
        assert main(["run", *words]) == 0
        ((command, environment),) = started
        return {**environment, "command": " ".join(command[-2:])}

    return go


def run_names() -> tuple[str, ...]:
    return (
        auto_attach.VARIABLE,
        auto_attach.OUTPUT,
        auto_attach.EARLIER,
        "SLURM_NNODES",
        "NNODES",
        "PET_NNODES",
        "SLURM_JOB_NUM_NODES",
    )


def a_run(folder: Path) -> None:
    (folder / "rank0").mkdir(parents=True)


@pytest.mark.parametrize(
    "words",
    [
        ("default", "--", "train.py", "--output=x"),
        ("--", "train.py", "--output=x"),
        ("train.py", "--output=x"),
        ("--plan", "default", "--", "train.py", "--output=x"),
    ],
)
def test_plan_and_command_are_told_apart(start: Start, tmp_path: Path, words: tuple[str, ...]) -> None:
    started = start(*words)
    assert (started[auto_attach.VARIABLE], started["command"]) == ("default", "train.py --output=x")
    assert started[auto_attach.OUTPUT] == "probe_out"


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "here", "plan.yaml"),
        ("plan.yaml", "--output", "here"),
        ("--output=here", "plan.yaml"),
        ("-o", "here", "plan.yaml"),
        ("plan.yaml", "-o", "here"),
    ],
)
def test_the_output_may_be_said_before_and_behind_the_plan(start: Start, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "plan.yaml").write_text("level: L0\n")
    started = start(*words, "--", "train.py", "--output")
    assert started[auto_attach.OUTPUT] == "here"
    assert started[auto_attach.VARIABLE] == str(tmp_path / "plan.yaml")
    assert started["command"] == "train.py --output"


def test_an_option_that_there_is_not_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--outptu", "here", "train.py"]) != 0
    assert "--outptu is no option of `trainprobe run`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("--", "torchrun", "--nproc-per-node", "2", "train.py"), "2 train.py"),
        (("--", "python", "default"), "python default"),
        (("-o", "here", "--", "srun", "--", "train.py"), "-- train.py"),
        (("--", "plan.yaml", "--", "train.py"), "-- train.py"),
        (("torchrun", "train.py", "--", "plan.yaml"), "-- plan.yaml"),
        (("train.py", "--", "x"), "-- x"),
        (("-m", "package.train", "--lr", "1"), "--lr 1"),
    ],
)
def test_a_command_is_not_taken_for_a_plan(start: Start, words: tuple[str, ...], command: str) -> None:
    started = start(*words)
    assert (started[auto_attach.VARIABLE], started["command"]) == ("default", command)


@pytest.mark.parametrize(
    "words", [("absent.yaml", "train.py"), ("absent.json", "--", "train.py"), ("--plan", "absent.yml", "x")]
)
def test_a_plan_that_is_absent_is_named(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) != 0
    assert "there is no such plan file" in capsys.readouterr().err


def test_a_word_before_dashes_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "runs/debug", "--", "train.py"]) != 0
    assert "runs/debug: a plan is a .yaml, .yml or .json file" in capsys.readouterr().err


def test_a_second_run_is_written_beside_the_first_and_says_so(start: Start, tmp_path: Path, capsys) -> None:
    for number in ("", ".2", ".3"):
        started = start("default", "--", "train.py")
        assert started[auto_attach.OUTPUT] == f"probe_out{number}"
        a_run(tmp_path / f"probe_out{number}")
    assert started[auto_attach.EARLIER] == "probe_out.2"
    assert "this one is written to probe_out.3" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["refuse", "continue", "replace"])
def test_a_plan_that_says_what_to_do_with_an_earlier_run_is_followed(start: Start, tmp_path: Path, asked: str) -> None:
    (tmp_path / "plan.yaml").write_text(f"output: out\non_existing: {asked}\n")
    a_run(tmp_path / "out")
    assert start("plan.yaml", "--", "train.py")[auto_attach.OUTPUT] == "out"


def test_several_machines_share_one_folder(start: Start, tmp_path: Path) -> None:
    a_run(tmp_path / "probe_out")
    started = start("default", "--", "torchrun", "--nnodes", "2", "train.py")
    assert started[auto_attach.OUTPUT] == "probe_out" and auto_attach.EARLIER not in started  # the processes find one


def test_only_a_training_that_is_resumed_goes_on_in_the_earlier_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(first_step: int) -> None:
        started = start("default", "--", "train.py")
        for name in run_names():
            if name in started:
                monkeypatch.setenv(name, started[name])
        loop = torch_loop.attach(model, optimizer, auto_attach._plan("pytorch"), first_step=first_step)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        loop.close()

    for first_step in (0, 2, 0):
        train(first_step)
    assert output_folder.asked_output(Path("probe_out.2")) == Path("probe_out")
    assert output_folder.asked_output(Path("other.2")) == Path("other.2")
    assert list(recorded(tmp_path / "probe_out")) == [0, 1, 2, 3]
    assert list(recorded(tmp_path / "probe_out.2")) == [0, 1]
