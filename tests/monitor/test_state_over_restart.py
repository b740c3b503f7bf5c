"""What the rules remember outlives the process: a run that is continued is judged as if it had never stopped."""

from __future__ import annotations

import torch

import trainprobe


def train(folder, steps, first, **plan):
    """Train a small layer; from step 30 on its loss is ten thousand times what it was."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(16, 8)
    with trainprobe.watch(
        model, optimizer, level="off", output=folder, monitor={"rules": {"spike": {"warmup": 20}}}, **plan
    ) as probe:
        for i in range(first, first + steps):
            with probe.step(i):
                loss = model(batch).square().mean() * (1e4 if i == 30 else 1.0)
                probe.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [f for f in probe.findings if f.rule == "spike"]


def test_a_spike_right_after_a_restart_is_seen_against_the_history_before_it(tmp_path):
    whole = train(tmp_path / "whole", 31, 0)
    train(tmp_path / "parts", 30, 0)
    continued = train(tmp_path / "parts", 1, 30, on_existing="continue")
    assert [f.step for f in continued] == [f.step for f in whole] == [30] * len(whole) and whole


def test_a_run_that_begins_anew_remembers_nothing(tmp_path):
    train(tmp_path / "first", 30, 0)
    assert train(tmp_path / "second", 1, 30) == []
