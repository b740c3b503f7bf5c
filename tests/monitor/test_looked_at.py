"""What was not looked at is said by `judge`, by the page and by `top`, and never passes as nothing found."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainprobe
from trainprobe import Probe
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.history import History
from trainprobe.monitor.report.from_run import collect_histories, view_of
from trainprobe.monitor.run_folder import read_frames

ROOT = Path(__file__).parents[2]
NO_LOSS = 'Not judged: the loss, which no step recorded (`probe.note("loss", loss)` records it).'


def train(
    folder: Path,
    steps: Iterable[int],
    place: Place | None = None,
    losses: float | None = 1.0,
    flushed: int = -1,
    **fields: Any,
) -> None:
    """Train a layer. losses: times the number of the step is noted as the loss. flushed: a step that is on disk at once."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = Probe({"output": folder, "level": "off", "monitor": True, "on_existing": "continue", **fields}, place=place)
    probe.open(model, [optimizer])
    for step in steps:
        with probe.step(step):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            if losses is not None:
                probe.note("loss", losses * (step + 1))
        if step == flushed and probe.writer is not None:
            probe.writer.flush()
    probe.close()


def told(folder: Path, capsys: Any) -> list[str]:
    """What `judge`, the page and `top` say, each on one line without frames and marks."""
    capsys.readouterr()
    main(["judge", str(folder)])
    said = [capsys.readouterr().out]
    main(["report", str(folder)])
    said.append(html.unescape((folder / "report.html").read_text().replace("\\", "")))
    capsys.readouterr()
    main(["top", "--once", str(folder)])
    said.append(capsys.readouterr().out)
    return [" ".join(text.replace("│", " ").split()) for text in said]


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [({0: 6}, "Of ranks 1–3 nothing is there"), ({0: 6, 1: 3, 2: 6, 3: 2}, "Ranks 1, 3 had fewer steps: down to 2")],
)
def test_ranks_that_died_are_named(steps, sentence, tmp_path, capsys):
    for rank, count in steps.items():
        train(tmp_path, range(count), Place(rank, 4, {"dp": (rank, 4)}))
    assert [sentence in text for text in told(tmp_path, capsys)] == [True] * 3


def test_a_loss_that_no_step_recorded_is_named(tmp_path, capsys):
    train(tmp_path / "without", range(80), losses=None)
    assert [NO_LOSS in text for text in told(tmp_path / "without", capsys)] == [True] * 3
    train(tmp_path / "with", range(80), losses=0.0)
    assert [NO_LOSS in text for text in told(tmp_path / "with", capsys)] == [False] * 3


def test_rules_that_a_run_is_too_short_for_are_named(tmp_path, capsys):
    train(tmp_path, range(6))
    assert all("spike (59 more)" in text for text in told(tmp_path, capsys))


def test_steps_that_were_recorded_twice_are_named_and_the_later_value_is_shown(tmp_path, capsys):
    train(tmp_path, range(10, 40))
    train(tmp_path, range(5, 20), losses=100.0)
    sentence = "The run went back: steps 10–19 were recorded more than once"
    assert [sentence in text for text in told(tmp_path, capsys)] == [True] * 3
    histories: dict[int, History] = {}
    for _ in collect_histories(read_frames(tmp_path), histories):
        pass
    view = view_of("", histories, {})
    steps, values = view.scalars["loss"]
    assert np.asarray(steps).tolist() == list(range(5, 40))
    assert np.asarray(values).tolist() == [100.0 * (s + 1) if s < 20 else s + 1.0 for s in range(5, 40)]
    assert view.meta["steps"] == "5 to 39"


def test_a_run_whose_plan_names_none_of_its_steps_has_no_findings_to_be_glad_of(tmp_path, capfd):
    train(tmp_path, range(6), monitor={"step": "100-200"})
    assert (
        "6 steps, 0 of them watched, nothing judged (none of them is among the steps that the plan names)"
        in capfd.readouterr().err
    )
    with trainprobe.watch(torch.nn.Linear(2, 2), output=tmp_path / "none", level="off", monitor=True):
        pass
    assert "0 steps watched, nothing judged" in capfd.readouterr().err


@pytest.mark.parametrize("plan", [{"monitor": True}, {"audit": True, "record": "L0"}, {"monitor": True, "record": "mix"}])
@pytest.mark.parametrize("healthy", [0, 2])
def test_a_step_that_fails_is_among_the_steps_that_the_plan_names(plan, healthy, tmp_path, capfd):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError), trainprobe.watch(model, optimizer, output=tmp_path, **plan) as probe:
        for width in [4] * healthy + [5]:
            with probe.step():
                model(torch.randn(3, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    judged = "no findings" if healthy else "no step judged as a whole"
    steps = "3 steps, 2" if healthy else "1 step, 0"
    assert f"trainprobe: {steps} of them watched, 1 cut short, {judged}; output in" in capfd.readouterr().err


def test_a_run_in_which_the_tool_stopped_at_once_says_nothing_of_the_plan(tmp_path, capfd):
    model = torch.nn.Linear(4, 2)
    with trainprobe.watch(model, output=tmp_path, monitor=True, on_error="continue") as probe:
        probe.guard.run(torch.ones(2).reshape, 3)
        with probe.step():
            model(torch.randn(3, 4))
    assert "1 step, 0 of them watched, then disabled by a fault of its own, nothing judged; output" in capfd.readouterr().err


@pytest.mark.parametrize("sinks", [["dump"], ["csv"], ["tensorboard"]])
@pytest.mark.parametrize("judge", ["monitor", "audit"])
def test_findings_are_kept_under_every_sink(sinks, judge, tmp_path, capsys):
    """The rules find a NaN, at a step that the dump does not hold, and the audit a parameter that no optimizer holds."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    plan = {"output": tmp_path, "level": "L0", "step": "0-1", judge: True, "sinks": sinks, "console": False}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(4):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.full((3, 4), float("nan") if step == 3 else 1.0)).square().mean().backward()
                optimizer.step()
    found = {finding.rule for finding in probe.findings if finding.severity != "info"}
    assert ("nonfinite" if judge == "monitor" else "ownership") in found
    assert {finding.rule for finding in read_findings(tmp_path)} >= found
    assert main(["judge", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert all(rule in out for rule in found)
    if sinks == ["dump"]:
        main(["runs", str(tmp_path)])
        assert " error" in capsys.readouterr().out


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.monitor.test_looked_at import train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, resource.RLIM_INFINITY))
train(Path(sys.argv[1]), range(600), losses=0.0, on_error="continue")
"""


def test_steps_that_the_disk_refused_are_told_by_judge(tmp_path, capsys):
    """Files of more than 25 kB are refused: the run log ends there, and a file of its own says so."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert main(["judge", str(tmp_path)]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert re.match(r"\d+ of 600 steps recorded: the others are not judged", told)
    assert re.search(
        r"error writer \(rank 0\) \[recorded\]: the writer 'parquet' failed: \[Errno 27\] File too large; it is", told
    )
    assert re.search(r"the writer 'parquet' lost \d+ of 600 steps, \d+ to 599", told)


def test_gradients_of_steps_that_a_scaler_skipped_are_not_taken_for_finite_ones(tmp_path, capfd):
    """In steps 5 to 7 the gradients are infinite, and the scaler has the optimizer never see them."""
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(4, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, {"output": tmp_path, "level": "off", "monitor": True}) as probe:
        for step in range(10):
            with probe.step(step):
                optimizer.zero_grad()
                loss = model(torch.randn(3, 4)).square().mean()
                scaler.scale(loss * (float("inf") if 5 <= step < 8 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                probe.note("loss", loss.detach())
    sentence = "In steps 5–7 no optimizer stepped, as when a gradient scaler skips one: gradients of such a step are"
    assert sentence in capfd.readouterr().err
    assert [sentence in text for text in told(tmp_path, capfd)] == [True] * 3
    main(["nan-trace", str(tmp_path)])
    assert sentence in capfd.readouterr().out


@pytest.mark.parametrize("steps", [True, False])
def test_a_training_that_never_steps_is_not_only_healthy(steps, tmp_path, capfd):
    """Each step clears what its backward pass made, and no optimizer uses it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, {"output": tmp_path, "level": "off", "monitor": True}) as probe:
        for step in range(10):
            with probe.step(step):
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
                if steps:
                    optimizer.step()
                optimizer.zero_grad()
                probe.note("loss", loss.detach())
    sentence = "No update was recorded: gradients of parameters and new weights are not looked at."
    capfd.readouterr()
    assert [sentence in text for text in told(tmp_path, capfd)[:2]] == [not steps] * 2
    main(["nan-trace", str(tmp_path)])
    assert (sentence in capfd.readouterr().out) is not steps


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.monitor.test_looked_at import train

def steps():
    yield from range(30)
    os.kill(os.getpid(), signal.SIGKILL)

train(Path(sys.argv[1]), steps(), flushed=20)
"""


def test_a_run_that_was_killed_is_not_one_that_ended(tmp_path, capsys):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=300)
    sentence = "The run goes on, or it was killed: its last second is not in the log"
    assert [sentence in text for text in told(tmp_path, capsys)[:2]] == [True] * 2
    train(tmp_path, range(10, 40))
    assert [sentence in text for text in told(tmp_path, capsys)[:2]] == [False] * 2
