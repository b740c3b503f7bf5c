"""Loops that are not what `watch` was told: one sentence each, and none for a loop that is."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import trainprobe

PLAN = {"level": "L0", "monitor": True, "sinks": []}


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(probe: trainprobe.Probe, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        with probe.step():
            loss = model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.note("loss", loss)


def healthy() -> None:
    model, optimizer = net()
    with trainprobe.watch(model, optimizer, PLAN) as probe:
        train(probe, model, optimizer)


def another_optimizer_is_made_later() -> None:
    model, optimizer = net()
    with trainprobe.watch(model, optimizer, PLAN) as probe:
        train(probe, model, torch.optim.Adam(model.parameters()))


def masters() -> None:
    model, _ = net()
    copies = [p.detach().double().requires_grad_() for p in model.parameters()]
    with trainprobe.watch(model, optimizer := torch.optim.SGD(copies, lr=0.1), PLAN) as probe:
        train(probe, model, optimizer)


def scripted() -> None:
    model: Any = torch.jit.script(net()[0])
    with trainprobe.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), PLAN) as probe:
        train(probe, model, optimizer)


def traced() -> None:
    model: Any = torch.jit.trace(net()[0], torch.ones(2, 4))
    with trainprobe.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), PLAN) as probe:
        train(probe, model, optimizer)


def inference() -> None:
    model, _ = net()
    with trainprobe.watch(model, level="L0", sinks=[]) as probe, probe.step():
        model(torch.ones(2, 4))


@pytest.mark.parametrize("loop", [healthy, another_optimizer_is_made_later, masters, inference, scripted, traced])
def test_a_loop_that_is_what_was_told_has_no_sentence(loop: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    loop()
    err = capsys.readouterr().err
    for words in ("No step", "updated", "No update", "that was given", "closed"):
        assert words not in err
    assert not _global_optimizer_post_hooks


def test_no_step_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()
    with trainprobe.watch(model, optimizer, PLAN):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert capsys.readouterr().err.count("No step was seen: put `with probe.step():`") == 1


def test_an_error_of_the_program_has_no_sentence_about_steps(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()
    with pytest.raises(ZeroDivisionError), trainprobe.watch(model, optimizer, PLAN):
        raise ZeroDivisionError
    assert "No step" not in capsys.readouterr().err


def test_steps_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()
    with trainprobe.watch(model, optimizer, PLAN) as probe:
        train(probe, model, optimizer)
    train(probe, model, optimizer)
    assert capsys.readouterr().err.count("step 3 begins after the probe was closed") == 1


def test_a_model_that_was_copied_after_its_optimizer_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()
    swapped = copy.deepcopy(model)
    with trainprobe.watch(swapped, optimizer, PLAN) as probe:
        train(probe, model, optimizer)
    err = capsys.readouterr().err
    assert err.count("the SGD that was given holds no parameter of Sequential") == 1
    assert (
        err.count("Nothing updated Sequential, the model that was given; trained here: Sequential (4 parameter tensors, 3") == 1
    )


def test_steps_without_an_update(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = net()
    with trainprobe.watch(model, None, PLAN) as probe:
        for _ in range(3):
            with probe.step():
                model(torch.ones(2, 4)).square().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
    assert capsys.readouterr().err.count("No update of Sequential by an optimizer of torch.optim was seen") == 1


NEVER_ENTERED = """
import torch, trainprobe
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{block}
for _ in range(2):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.parametrize(
    ("block", "said", "folders"),
    [
        ("probe = trainprobe.watch(model, optimizer)", "nothing was watched: watch(...) begins at `with`.", 0),
        ("with trainprobe.watch(model, optimizer): model(torch.ones(2, 4))", "No step was seen: put `with probe.step():`", 1),
    ],
    ids=["never entered", "no step"],
)
def test_a_process_that_watched_nothing_says_so_in_one_line(block: str, said: str, folders: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_ENTERED.format(block=block)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.iterdir())) == folders


def test_a_method_of_the_probe_on_the_block_says_what_to_write_and_says_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()
    block: Any = trainprobe.watch(model, optimizer, PLAN)
    with pytest.raises(AttributeError, match=r"watch\(\.\.\.\) has no step: nothing was watched: .* `with trainprobe.watch"):
        block.step()
    del block
    assert "nothing was watched" not in capsys.readouterr().err


def test_a_function_under_the_block_is_watched_at_each_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net()

    @trainprobe.watch(model, optimizer, output=tmp_path / "out")
    def trained() -> None:
        model(torch.ones(2, 4)).mean().backward()

    trained()
    err = capsys.readouterr().err
    assert (err.count("No step was seen"), err.count("nothing was watched")) == (1, 0)
