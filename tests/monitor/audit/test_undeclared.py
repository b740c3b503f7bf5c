"""What the audit cannot judge because nobody declared it is not said after each run, and found where it is declared."""

from __future__ import annotations

import sys

import pytest
import torch

import trainprobe

BEYOND = "What only an experiment shows, `trainprobe preflight -- train.py` tests."


def train(folder, declares=False, micro=1, wrong=1.0, **audit):
    """Train two steps of accumulated gradients, whose loss is `wrong` times the mean over the batch; return the probe."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"level": "off", "sinks": [], "audit": audit or True}
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for _ in range(2):
            batches = [torch.randn(4, 3) for _ in range(micro)]
            with probe.step():
                if declares:
                    probe.declare_loss(lambda m, batches=batches: m(torch.cat(batches)).square().mean())
                optimizer.zero_grad()
                for x in batches:
                    (model(x).square().mean() * wrong / micro).backward()
                optimizer.step()
    return probe


def test_the_end_line_names_the_script_that_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my scripts/fine tune.py", "--lr", "1"])
    train(tmp_path)
    assert capsys.readouterr().err.endswith("`trainprobe preflight -- 'my scripts/fine tune.py'` tests.\n")


@pytest.mark.parametrize("how", [{}, {"declares": True, "micro": 2}, {"relations": {"declared_loss": False}}])
def test_the_end_of_a_run_is_one_line(tmp_path, capsys, how):
    assert train(tmp_path, **how).findings == []
    _, end = capsys.readouterr().err.splitlines()
    assert end == "trainprobe: 2 steps watched, no findings; nothing was written to disk. " + BEYOND


def test_a_declared_loss_finds_a_gradient_that_is_not_that_of_the_whole_batch(tmp_path):
    assert train(tmp_path / "right", declares=True, micro=2).findings == []
    found = train(tmp_path / "wrong", declares=True, micro=2, wrong=2.0).findings
    assert {finding.rule for finding in found} == {"declared_loss"}
    assert found[0].measured == pytest.approx(2.0, rel=1e-3)
