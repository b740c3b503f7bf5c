"""Where a run is written that finds earlier ones: beside them, unless it is shown to go on with the newest."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainprobe
from tests.distributed.launch import free_port
from tests.integrations.records import recorded
from trainprobe.cli import main
from trainprobe.integrations.output_folder import updates_made
from trainprobe.integrations.torch_loop import attach

Saved = dict[str, Any]


def made(saved: Saved | None, kind: Callable[..., Any] = torch.optim.AdamW) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer, as a checkpoint has them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.01)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch goes on counting in what it is given
    return model, optimizer


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def in_a_block(folder: Path, saved: Saved | None = None, steps: int = 3, **plan: Any) -> Saved:
    model, optimizer = made(saved, plan.pop("kind", torch.optim.AdamW))
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for _ in range(steps):
            with probe.step():
                one_step(model, optimizer)
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def attached(folder: Path, saved: Saved | None = None, steps: int = 3, **plan: Any) -> Saved:
    model, optimizer = made(saved)
    loop = attach(model, optimizer, output=folder, **plan)
    for _ in range(steps):
        one_step(model, optimizer)
    loop.close()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("train", [in_a_block, attached])
def test_a_new_run_is_written_beside_and_its_first_line_says_so(train, tmp_path, capsys):
    out = tmp_path / "out"
    for number in ("", ".2", ".3"):
        train(out)
        first = capsys.readouterr().err.splitlines()
        said = f"trainprobe: {out} holds an earlier run: this one is written to {out}{number}"
        assert (said in first[:1]) == bool(number)
    for number in ("", ".2", ".3"):
        assert list(recorded(tmp_path / f"out{number}")) == [0, 1, 2]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = capsys.readouterr().out
    assert all(f'out{number}"' in listed for number in ("", ".2", ".3"))


@pytest.mark.parametrize("train", [in_a_block, attached])
def test_a_resumed_training_goes_on_behind_the_newest_run_with_its_step_number(train, tmp_path, capsys):
    out = tmp_path / "out"
    train(out)
    saved = train(out, steps=4)
    capsys.readouterr()
    train(out, saved)
    assert f"trainprobe: the training goes on with the run in {out}.2" in capsys.readouterr().err.splitlines()[0]
    assert list(recorded(out)) == [0, 1, 2]
    assert list(recorded(tmp_path / "out.2")) == [0, 1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "out.3").exists()


def test_a_training_that_goes_back_to_an_earlier_checkpoint_of_its_run_goes_on_there(tmp_path):
    saved = in_a_block(tmp_path / "out", steps=2)
    in_a_block(tmp_path / "out", saved, steps=4)
    in_a_block(tmp_path / "out", saved, steps=1)
    assert sorted(set(recorded(tmp_path / "out"))) == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "out.2").exists()


def test_counters_that_no_run_there_explains_are_no_resume(tmp_path):
    saved = in_a_block(tmp_path / "elsewhere", steps=9)
    in_a_block(tmp_path / "out", steps=3)
    in_a_block(tmp_path / "out", saved)
    assert list(recorded(tmp_path / "out")) == list(recorded(tmp_path / "out.2")) == [0, 1, 2]


def test_an_optimizer_without_counters_and_a_run_that_still_goes_on_are_no_evidence(tmp_path):
    saved = in_a_block(tmp_path / "sgd", kind=torch.optim.SGD)
    in_a_block(tmp_path / "sgd", saved, kind=torch.optim.SGD)
    assert (tmp_path / "sgd.2").exists()
    model, optimizer = made(None)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out") as probe:
        with probe.step():
            one_step(model, optimizer)
        in_a_block(tmp_path / "out", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert list(recorded(tmp_path / "out")) == [0]
    assert list(recorded(tmp_path / "out.2")) == [0, 1, 2]


@pytest.mark.parametrize("fields", [{}, {"foreach": False}, {"capturable": False, "amsgrad": True}])
def test_updates_are_counted_by_the_optimizer_itself(fields):
    model, optimizer = made(None, lambda p, lr: torch.optim.AdamW(p, lr=lr, **fields))
    for number in range(3):
        assert updates_made(optimizer) == number
        one_step(model, optimizer)
    assert updates_made(None) == updates_made(torch.optim.SGD(model.parameters(), lr=0.1)) == 0


RANKS = """
import os, sys, time
import torch, trainprobe
rank, how = int(os.environ["RANK"]), sys.argv[1]
model = torch.nn.Linear(4, 2)
if how == "store":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
time.sleep(rank)  # rank 0 has begun to write
with trainprobe.watch(model, optimizer, output=sys.argv[2]) as probe:
    for _ in range(3):
        with probe.step():
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    time.sleep(1 - rank)
if how == "store":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["store", "launcher"])
def test_the_ranks_of_a_run_agree_on_its_folder(how, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    for number in ("", ".2"):
        done = subprocess.run(
            [*launch, str(tmp_path / "ranks.py"), how, str(tmp_path / "out")], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("holds an earlier run: this one is written to") == bool(number)
        assert sorted(path.name for path in (tmp_path / f"out{number}").glob("rank*")) == ["rank0", "rank1"]
        assert all(list(recorded(tmp_path / f"out{number}", rank)) == [0, 1, 2] for rank in range(2))
    assert not (tmp_path / "out.3").exists()
