"""Call stacks of a step: those of its own calls, whatever the steps before it have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainprobe
from trainprobe.engine.core.step_layout import layout_of


def steps_of(folder: Path, dumped: list[int]) -> list[Any]:
    """Return six steps of a monitored training, of which some are dumped; the fourth calls an operator at another line."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    plan = {"level": "mix", "step": dumped, "monitor": {"optimizer_state": False}, "console": False, "output": str(folder)}
    with trainprobe.watch(model, optimizer, plan) as probe:
        probe.watchers.append(lambda step_data: found.append(step_data) or ())
        for step in range(6):
            with probe.step():
                optimizer.zero_grad()
                out = model(torch.ones(2, 4))
                if step == 3:
                    out = torch.tanh(out)
                loss = out.square().mean()
                loss.backward()
                optimizer.step()
    return found


def lines(step_data: Any) -> dict[tuple[str, ...], tuple[str, ...]]:
    return {(c.kind, c.name, str(c.call), c.phase): tuple(step_data.stacks[c.stack]) for c in step_data.calls if c.stack >= 0}


def test_a_step_holds_the_stacks_of_its_own_calls_and_no_others(tmp_path):
    several, alone = steps_of(tmp_path / "several", [1, 3, 4]), steps_of(tmp_path / "alone", [3])
    assert [len(step.stacks) > 0 for step in several] == [False, True, False, True, True, False]
    assert len({id(layout_of(several[step])) for step in (2, 5)}) == 1
    assert len({id(layout_of(several[step])) for step in (1, 4)}) == 1, "though another stack was met between them"
    assert lines(several[3]) == lines(alone[3])
    assert all({call.stack for call in step.calls} - {-1} == {*range(len(step.stacks))} for step in several)
    assert any("torch.tanh" in line for stack in lines(several[3]).values() for line in stack)
