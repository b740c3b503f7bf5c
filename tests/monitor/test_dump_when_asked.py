"""The action dump: the steps after a finding are collected in full, also under a plan that otherwise dumps nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import trainprobe
from tests.lockstep import differences, train
from tests.zoo import load
from trainprobe.engine.storage.dumps import read_step
from trainprobe.engine.storage.dumps.log import read_log

NAN_AT = 3
RULES = {"nonfinite": {"actions": ["log", "dump"]}}


def run(folder, **plan):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(8):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(3, 4) * (float("nan") if step == NAN_AT else 1.0)).square().mean().backward()
                if step != NAN_AT:
                    optimizer.step()
    return sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))


@pytest.mark.parametrize("sinks", [[], ["jsonl"], ["dump"]])
def test_the_next_steps_are_dumped_with_every_op_and_module_though_the_level_is_off(tmp_path, sinks):
    """Whatever writers the plan names: a dump that is asked for is written."""
    plan = {"level": "off", "sinks": sinks, "monitor": {"rules": RULES, "actions": {"dump_steps": 2}}}
    assert run(tmp_path / "out", **plan) == [NAN_AT + 1, NAN_AT + 2]
    step_data = read_step(tmp_path / "out" / f"step{NAN_AT + 1}")[0]
    kinds = Counter(record.site.kind for record in step_data.records())
    assert {"module", "op"} <= set(kinds)
    assert {"0", "1", "2"} <= {record.site.name for record in step_data.records() if record.site.kind == "module"}


def test_a_step_that_is_dumped_and_monitored_holds_each_value_once(tmp_path):
    plan = {"level": "off", "sinks": ["parquet"], "monitor": {"rules": RULES}}
    run(tmp_path / "out", **plan)
    for step_data in read_log(tmp_path / "out" / "rank0"):
        calls = Counter(
            (c.name, c.phase, c.call) for c in step_data.calls if c.kind == "module" and c.phase == "forward" and c.name
        )
        assert set(calls.values()) == {1}, step_data.step
        assert any(c.kind == "op" for c in step_data.calls) == (step_data.step == NAN_AT + 1)


def test_a_plan_whose_rules_never_dump_writes_no_dump(tmp_path):
    assert run(tmp_path / "out", level="off", sinks=["parquet"], monitor=True) == []


def test_a_black_box_has_the_step_after_a_grave_finding_dumped(tmp_path):
    assert run(tmp_path / "out", level="off", sinks=[], monitor=True, black_box=True) == [NAN_AT + 1]


def test_a_training_has_the_same_bits_when_a_rule_dumps(tmp_path):
    case = load("residual_gpt")
    always = {"threshold": {"limit": 1e-9, "actions": ["dump"]}}

    def watch(model, optimizer):
        return trainprobe.watch(model, optimizer, level="off", sinks=[], monitor={"rules": always}, output=tmp_path / "out")

    assert differences(train(case), train(case, watch=watch)) == []
    assert list((tmp_path / "out").glob("step*"))
