"""The probe's torch-function mode and the program's own, put on and taken off in any order."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import trainprobe


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def meta() -> torch.device:
    """Return what `with torch.device` enters; its end takes off whatever mode stands on top, so it may not end first."""
    return torch.device("meta")


ORDERS = {"step inside": (0, 0), "mode inside": (1, 1), "step begins first": (1, 0), "mode begins first": (0, 1)}


@pytest.mark.parametrize(("mode", "order"), [*((Counting, o) for o in ORDERS), *((meta, o) for o in list(ORDERS)[:3])])
def test_each_leaves_the_other_in_place(mode, order, tmp_path):
    theirs = mode()
    with trainprobe.watch(torch.nn.Linear(2, 2), output=tmp_path, level="L1", sinks=["memory"], on_error="raise") as probe:
        enter, leave = (theirs.__enter__, probe.begin_step), (lambda: theirs.__exit__(None, None, None), probe.end_step)
        first, last = ORDERS[order]
        enter[first]()
        enter[1 - first]()
        made = torch.relu(torch.ones(2))
        collected_steps = [leave[1 - last](), leave[last]()]
    assert _get_current_function_mode_stack() == []
    assert made.device.type == ("cpu" if mode is Counting else "meta")
    assert torch.ones(1).device.type == "cpu"
    names = [call.name for step_data in collected_steps if step_data is not None for call in step_data.calls]
    assert "Functional.relu" in names or "Torch.relu" in names
    if mode is Counting:
        assert theirs.calls >= 2


def test_a_pause_within_a_mode_of_the_program_takes_the_right_one_away(tmp_path):
    with trainprobe.watch(torch.nn.Linear(2, 2), output=tmp_path, level="L1", sinks=["memory"], on_error="raise") as probe:
        probe.begin_step()
        with Counting() as counting:
            probe.pause()
            torch.tanh(torch.ones(1))
            before = counting.calls
            probe.resume()
            torch.sigmoid(torch.ones(1))
        step_data = probe.end_step()
    assert before >= 1
    assert counting.calls > before
    names = {call.name for call in step_data.calls}
    assert "Torch.sigmoid" in names
    assert "Torch.tanh" not in names
