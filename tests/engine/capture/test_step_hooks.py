"""Torch's global hooks around optimizer steps: there while steps are collected, one of each kind; gone with the last one."""

from __future__ import annotations

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import trainprobe
from trainprobe.engine.capture.patching.step_hooks import StepListener


def held() -> tuple[int, int]:
    return len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)


def test_they_stay_between_collected_steps_and_leave_with_the_last_one(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert held() == (0, 0)
    inside, behind = [], []
    with trainprobe.watch(model, optimizer, output=tmp_path, level="L0", step=[1, 2, 4]) as probe:
        for _ in range(6):
            with probe.step():
                model(torch.ones(1, 3)).sum().backward()
                inside.append(held())
                optimizer.step()
            behind.append(held())
    assert inside[0] == behind[0] == (1, 1)  # until `watch` has seen that the optimizer is the model's
    assert inside[1:] == [(1, 1), (1, 1), (0, 0), (1, 1), (0, 0)]
    assert behind[1:] == [(1, 1), (0, 0), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize("how", ["closed", "fault"])
def test_they_leave_when_no_step_follows_after_all(how, tmp_path, capsys):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = trainprobe.Probe(output=tmp_path, level="L0", on_error="continue")
    probe.open(model, optimizer)
    with probe.step():
        model(torch.ones(1, 3)).sum().backward()
    assert held() == (1, 1)
    if how == "fault":
        probe.guard.trip(RuntimeError("a fault for this test"))
        assert held() == (0, 0)
    probe.close()
    assert held() == (0, 0)


def test_between_two_steps_an_update_is_nobodys(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with trainprobe.watch(model, optimizer, output=tmp_path, level="off", monitor=True, sinks=["memory"]) as probe:
        for _ in range(2):
            probe.begin_step()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            seen.append([call.name for call in probe.end_step().calls])
            optimizer.step()
    assert seen[0] == seen[1] and seen[0]


def test_a_listener_that_leaves_for_a_while_takes_torchs_hooks_only_when_it_leaves_for_good():
    listener = StepListener(after=print)
    listener.remove(again=True)
    assert held() == (1, 1)
    again = StepListener(after=print)
    assert held() == (1, 1)
    again.remove()
    assert held() == (0, 0)
