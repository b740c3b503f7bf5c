"""What the audit does not judge because nobody declared it is said in one line, with the call that declares it."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from trainprobe.engine.core.records import Place

LINE = "Not judged: whether the gradient is that of the whole batch's loss"


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


def test_a_loss_that_is_not_declared_is_said_once_with_the_call_that_declares_it(tmp_path, capsys):
    assert train(tmp_path).findings == []
    told = capsys.readouterr().err
    assert told.count(LINE) == 1 and len(told.splitlines()) == 2  # the start and the end
    assert "`probe.declare_loss`" in told and "docs/audit.md" in told


@pytest.mark.parametrize("how", [{"declares": True, "micro": 2}, {"relations": {"declared_loss": False}}])
def test_nothing_is_said_where_it_is_declared_or_left_out(tmp_path, capsys, how):
    train(tmp_path, **how)
    _, end = capsys.readouterr().err.splitlines()
    assert end == "trainprobe: 2 steps watched, no findings; nothing was written to disk"


def test_what_the_line_asks_for_finds_a_gradient_that_is_not_that_of_the_whole_batch(tmp_path):
    assert train(tmp_path / "right", declares=True, micro=2).findings == []
    found = train(tmp_path / "wrong", declares=True, micro=2, wrong=2.0).findings
    assert {finding.rule for finding in found} == {"declared_loss"}
    assert found[0].measured == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_it_for_all(tmp_path, capsys, rank):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"level": "off", "sinks": [], "audit": {"ranks": False}, "output": str(tmp_path)}
    with trainprobe.Probe(plan, place=Place(rank, 2, {"dp": (rank, 2)})) as probe:
        probe.open(model, optimizer)
        with probe.step():
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert (LINE in capsys.readouterr().err) == (rank == 0)
