"""`trainprobe migrate`: the plan that is written means what the config.json means."""

from __future__ import annotations

import json

import pytest

from trainprobe.cli import main
from trainprobe.engine.plan.loading import load_plan

CONFIGURATIONS = [
    {
        "task": "statistics",
        "dump_path": "./out",
        "rank": [],
        "step": [0, "2-4"],
        "level": "mix",
        "statistics": {"list": ["fc"]},
    },
    {"task": "tensor", "dump_path": "./out", "tensor": {"scope": ["Module.a.B.forward.0", "Module.c.D.forward.0"]}},
    {"dump_path": "x", "statistics": {"summary_mode": ["max", "nan count", "hash"], "slice": [{"dim": 0, "end": 3}]}},
    {"dump_path": "x", "task": "grad_probe", "grad_probe": {"param_list": ["fc"]}},
    {"dump_path": "x", "level": "L0", "statistics": {"data_mode": ["backward"]}, "seed": 3, "zzz": 1},
]


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_the_plan_is_the_one_that_the_configuration_is_read_as(tmp_path, capsys, config):
    path, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(config))
    assert main(["migrate", str(path), "-o", str(plan)]) == 0
    assert load_plan(plan).model_dump() == load_plan(path).model_dump()
    assert load_plan(plan).notes == ()
    text = " ".join(plan.read_text().replace("#", " ").split())
    assert all(note.removeprefix(f"{path}: ") in text for note in load_plan(path).notes)
    assert main(["migrate", str(path), "-o", str(plan)]) == 3
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_plan_needs_no_migration_and_what_cannot_be_had_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"output": "x"}')
    assert main(["migrate", str(path)]) == 3
    path.write_text('{"level": "L2", "dump_path": "x"}')
    assert main(["migrate", str(path)]) == 3
    told = capsys.readouterr().err
    assert "it is a plan already" in told and "'L2' (kernel dumps of the device) has no equivalent" in told
