"""A fault of the tool while torch hands it a call: torch has taken the mode off for that long, and puts it back itself."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import _len_torch_function_stack

import trainprobe
from trainprobe.engine.capture.torch_ops import OpTap


@pytest.mark.parametrize("place", ["name", "hook"])
def test_a_fault_inside_a_torch_call_ends_the_recording_and_not_the_training(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINPROBE_ON_ERROR", "continue")
    model = torch.nn.Linear(3, 3)
    with trainprobe.watch(model, output=tmp_path, level="L1", on_error="continue") as probe:
        probe.begin_step()
        if place == "name":
            monkeypatch.setattr(probe.taps.get("ops", OpTap), "request_for", lambda func: 1 / 0)
        loss = model(torch.ones(2, 3)).sum()
        if place == "hook":
            loss.register_hook(lambda gradient: probe.guard.trip(ZeroDivisionError("planted")))
        loss.backward()
        probe.end_step()
    assert probe.guard.leaves_out("the tap OpTap") if place == "name" else probe.guard.tripped is not None
    assert model.weight.grad is not None
    assert _len_torch_function_stack() == 0
