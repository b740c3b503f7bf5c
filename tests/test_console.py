"""What a program that reads no findings is told on the console: that its plan did not do what it says."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from trainprobe import PrecisionDebugger


def train(probe, model, steps=3):
    for _ in range(steps):
        with probe.step():
            model(torch.ones(2, 3)).sum().backward()


def test_a_step_that_never_came_and_an_op_that_never_ran_are_said_when_the_block_ends(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(
        model, output=tmp_path / "out", level="L1", step=["0-1", 500], ops=["**linear", "Functional.lienar"]
    ) as probe:
        train(probe, model)
        assert capfd.readouterr().err == ""
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("trainprobe: the plan's ") for line in said)
    assert "did you mean" in "".join(line for line in said if "lienar" in line)
    assert "500 never came" in "".join(said)


def test_steps_in_which_nothing_was_seen_are_said_once(capfd, tmp_path):
    other = torch.nn.Linear(3, 1)
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "out") as probe:
        train(probe, other, steps=5)
    assert [f.step for f in probe.findings if f.rule == "probe"] == [0]
    (line,) = capfd.readouterr().err.splitlines()
    assert "step 0 was collected and nothing was seen" in line


def test_a_run_that_fails_is_told_of_its_plan_too(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with (
        pytest.raises(RuntimeError, match="broke"),
        trainprobe.watch(model, output=tmp_path / "out", step=[9]) as probe,
    ):
        train(probe, model)
        raise RuntimeError("broke")
    assert "9 never came" in capfd.readouterr().err


def test_a_debugger_says_it_when_it_is_closed(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    debugger = PrecisionDebugger(dump_path=tmp_path / "out", level="L0", step=[7])
    debugger.start(model)
    model(torch.ones(2, 3)).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    assert "7 never came" in capfd.readouterr().err


def test_a_plan_that_came_true_says_nothing(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(model, output=tmp_path / "out", step=["0-2"]) as probe:
        train(probe, model)
    assert capfd.readouterr().err == ""


def test_ranks_that_are_not_there_are_said(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(model, output=tmp_path / "out", rank=[5, "7-9"]) as probe:
        train(probe, model)
    assert "no rank of the plan's rank [5, '7-9'] is there: the run has rank 0 alone" in capfd.readouterr().err


def test_patterns_of_tensors_and_details_that_matched_nothing_are_said(capfd, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    details = [
        {"match": ["0"], "statistics": ["max"]},
        {"match": ["0.weight"], "task": "tensor"},
        {"match": ["layers.*"], "task": "tensor"},
    ]
    with trainprobe.watch(
        model, output=tmp_path / "out", tensors=["1", "Functional.linear", "8"], details=details, level="mix"
    ) as probe:
        train(probe, model)
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(" matched")[0] for line in said] == [
        "trainprobe: the plan's tensors pattern '8'",
        "trainprobe: the plan's details pattern 'layers.*'",
    ]


def test_the_parameters_of_the_model_itself_are_known_by_their_own_names(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    details = [{"match": ["weight"], "task": "tensor"}, {"match": ["wieght"], "task": "tensor"}]
    with trainprobe.watch(model, output=tmp_path / "out", details=details) as probe:
        train(probe, model)
    (line,) = capfd.readouterr().err.splitlines()
    assert "'wieght' matched no module, parameter or op" in line
