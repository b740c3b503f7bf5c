"""Numbers of a device may come steps later: the outputs are those of numbers that come at once, and nothing is lost or stale.

The transfers of a real training are held back: they have arrived only when somebody waits for them. What a device itself does
is in tests/stand_in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainprobe
from trainprobe.engine.arrays.torch_rows import TorchTransfer
from trainprobe.engine.storage.dumps import read_step
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.writer import flush_all
from trainprobe.engine.waiting_steps import MOST_ON_THEIR_WAY
from trainprobe.errors import StopTraining
from trainprobe.monitor.black_box.box import BOX_FILE

EVERY = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
MONITOR = {"level": "off", "sinks": ["jsonl"], "monitor": EVERY}
FEATURES = {
    **MONITOR,
    "monitor": {**EVERY, "features": {"formats": {"formats": ["fp8_e4m3"], "scale": "amax"}, "weights": True}},
}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no transfer arrive before it is waited for."""
    monkeypatch.setattr(TorchTransfer, "arrived", lambda self: False)


def train(folder: Path, plan: Any, steps: int = 7, nan_at: int = -1, each: Any = None, fail_at: int = -1, scale: float = 1.0):
    """Train with rows by torch's operations; return the probe, and of each step which steps were judged by its end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    judged: list[int] = []
    by_the_end: list[list[int]] = []
    options = {"console": False, "on_error": "raise", "native": False, "stacks": False, **plan, "output": folder}
    with trainprobe.watch(model, optimizer, options) as probe:
        probe.watchers.append(lambda step_data: judged.append(step_data.step) or ())
        for step in range(steps):
            with probe.step(step):
                optimizer.zero_grad()
                loss = model(torch.randn(3, 4) * (float("nan") if step == nan_at else 1.0)).square().mean()
                scaler.scale(loss).backward()
                if step == fail_at:
                    raise KeyError("the batch")
                scaler.step(optimizer)
                scaler.update()
                probe.note("loss", loss.detach())
            by_the_end.append([*judged])
            if each is not None:
                each(probe, step)
    return probe, by_the_end


def numbers(folder: Path) -> list[Any]:
    """Return all records of a run, NaN as text."""
    return [(s.step, json.dumps([str(record) for record in s.records()])) for s in read_log(folder / "rank0")]


@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["", "scaled"])
@pytest.mark.parametrize(
    "plan", [MONITOR, {"level": "L0", "sinks": ["jsonl"]}, {**MONITOR, "black_box": True}, FEATURES], ids=str
)
def test_what_is_written_is_the_same_and_in_order(tmp_path, monkeypatch, plan, scale):
    train(tmp_path / "at once", plan, scale=scale)
    monkeypatch.setattr(TorchTransfer, "arrived", lambda self: False)
    probe, by_the_end = train(tmp_path / "late", plan, scale=scale)
    assert numbers(tmp_path / "late") == numbers(tmp_path / "at once")
    assert [step for step, _ in numbers(tmp_path / "late")] == [*range(7)]
    assert by_the_end == [[*range(max(0, n - MOST_ON_THEIR_WAY))] for n in range(1, 8)]
    assert probe.collected == 7


def test_each_step_is_judged_when_its_numbers_have_come(tmp_path, monkeypatch):
    asked: dict[int, int] = {}

    def at_the_second_look(self: Any) -> bool:
        asked[id(self)] = asked.get(id(self), 0) + 1
        return asked[id(self)] > 1

    monkeypatch.setattr(TorchTransfer, "arrived", at_the_second_look)
    _, by_the_end = train(tmp_path, MONITOR)
    assert by_the_end == [[*range(n)] for n in range(7)]  # as the next step begins


def test_flush_hands_over_all_and_so_does_a_reader_of_this_process(tmp_path, late):
    seen = []

    def each(probe: Any, step: int) -> None:
        if step in (2, 4):
            probe.flush() if step == 2 else flush_all()
            seen.append(len(numbers(tmp_path)))

    train(tmp_path, MONITOR, each=each)
    assert seen == [3, 5]


def test_a_writer_that_closes_as_the_program_ends_is_handed_the_rest(tmp_path, late):
    def each(probe: Any, step: int) -> None:
        if step == 6:
            probe.writer.close()
            assert [step for step, _ in numbers(tmp_path)] == [*range(7)]

    train(tmp_path, MONITOR, each=each)


def test_a_rule_that_may_stop_the_run_stops_it_in_its_step(tmp_path, late):
    plan = {**MONITOR, "monitor": {"rules": {"nonfinite": {"actions": ["log", "stop"]}}}}
    with pytest.raises(StopTraining, match="at step 2"):
        train(tmp_path, plan, nan_at=2)
    assert [step for step, _ in numbers(tmp_path)] == [0, 1, 2]


def test_a_rule_that_dumps_has_the_next_steps_dumped_that_begin_after_it_knew(tmp_path, late):
    plan = {**MONITOR, "monitor": {"rules": {"nonfinite": {"actions": ["log", "dump"]}}, "actions": {"dump_steps": 1}}}
    train(tmp_path, plan, steps=9, nan_at=1)
    assert [path.name for path in tmp_path.glob("step*")] == [f"step{1 + MOST_ON_THEIR_WAY + 1}"]


def test_an_audited_step_is_judged_as_it_ends(tmp_path, late):
    _, by_the_end = train(tmp_path, {"level": "off", "monitor": True, "audit": {"every": 3}})
    assert by_the_end == [[0], [0], [0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [*range(7)]]


def test_values_follow_the_steps_before_them_to_the_writer(tmp_path, late):
    """The files of a step are open until its numbers are written: those of the next step must not come between."""
    plan = {"level": "L0", "task": "tensor", "sinks": ["dump"], "step": [1, 2, 5]}
    train(tmp_path, plan)
    for step in (1, 2, 5):
        step_data = read_step(tmp_path / f"step{step}")[0]
        assert any(record.tensor for record in step_data.records())


def test_steps_before_one_that_stores_values_come_first(tmp_path, late):
    def each(probe: Any, step: int) -> None:
        if step == 3:
            assert probe._waiting
            probe.collect_next(1)

    plan = {
        "level": "off",
        "sinks": ["jsonl", "dump"],
        "task": "tensor",
        "monitor": {**EVERY, "rules": {"nonfinite": {"actions": ["dump"]}}},
    }
    train(tmp_path, plan, each=each)
    assert [step for step, _ in numbers(tmp_path)] == [*range(7)]
    step_data = read_step(tmp_path / "step4")[0]
    assert any(record.tensor for record in step_data.records())


def test_what_the_error_of_a_step_left_is_written_with_the_steps_before_it(tmp_path, late):
    with pytest.raises(KeyError):
        train(tmp_path, {**MONITOR, "black_box": {"steps": 4}}, fail_at=5)
    pieces = (tmp_path / "rank0" / BOX_FILE).read_text().splitlines()[1:]
    assert [json.loads(piece)["reel"]["step"] for piece in pieces] == [2, 3, 4, 5]
    assert [step for step, _ in numbers(tmp_path)] == [*range(6)]


def test_the_random_state_in_the_black_box_is_that_of_the_steps_own_end(tmp_path, monkeypatch):
    states = []
    for name in ("at once", "late"):
        with pytest.raises(KeyError):
            train(tmp_path / name, {**MONITOR, "black_box": {"steps": 4}}, fail_at=5)
        lines = (tmp_path / name / "rank0" / BOX_FILE).read_text().splitlines()[1:]
        states.append([str(json.loads(line)["facts"]) for line in lines])
        monkeypatch.setattr(TorchTransfer, "arrived", lambda self: False)
    assert states[0] == states[1] and len(set(states[0])) == 4


def test_a_plan_that_changes_holds_for_the_steps_that_follow(tmp_path, late):
    def each(probe: Any, step: int) -> None:
        if step == 2:
            probe.change(monitor={"rules": {"nonfinite": False}})

    probe, _ = train(tmp_path, {**MONITOR, "monitor": {"rules": {"nonfinite": {}}}}, nan_at=2, each=each)
    assert [finding.step for finding in probe.findings if finding.rule == "nonfinite"] == [2]


def test_a_fault_of_the_tool_costs_no_step_that_was_collected_before_it(tmp_path, late, capsys):
    def each(probe: Any, step: int) -> None:
        if step == 3:
            probe.guard.raising = False
            probe.guard.run(lambda: 1 / 0)

    probe, by_the_end = train(tmp_path, MONITOR, each=each)
    assert [step for step, _ in numbers(tmp_path)] == [0, 1, 2, 3]
    assert by_the_end[-1] == [] and probe.guard.tripped is not None
