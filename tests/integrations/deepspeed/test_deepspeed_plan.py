"""One plan with dump, monitor, audit and configuration capture gives all four under DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.monitor_files import assert_written, write_config
from tests.integrations.one_plan import assert_all_outputs, plan_file
from trainprobe.engine.storage.dumps.findings_file import read_findings

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.proves("DeepSpeed", "all four outputs of one plan")
def test_attach_does_all_that_the_plan_says(require, tmp_path):
    require("deepspeed")
    plan_file(tmp_path, dumped=2)
    launch(Path(__file__).with_name("train_planned.py"), 1, str(tmp_path), timeout=300)
    assert_all_outputs(tmp_path, dumped=2, steps=[1, 2, 3, 4, 5], layer="fc2", written=(4, "fc2.weight"))


def test_a_save_beside_an_error_is_flagged(require, tmp_path):
    require("deepspeed")
    (tmp_path / "saves").mkdir()
    plan = {"output": str(tmp_path / "out"), "record": "nothing", "audit": {"every": 1}, "save_gate": True}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    launch(Path(__file__).with_name("train_planned.py"), 1, str(tmp_path), timeout=300)
    found = [f.message for f in read_findings(tmp_path / "out") if f.rule == "save_gate"]
    assert found == ["DeepSpeedEngine.save_checkpoint while an error stands: untouched_between_steps (step 4)"]


def test_trainer_mon_writes_its_files(require, tmp_path):
    require("deepspeed")
    write_config(tmp_path)
    launch(Path(__file__).with_name("train_trainer_mon.py"), 1, str(tmp_path), timeout=300)
    assert_written(tmp_path, steps=[1, 2], parameter="fc2.weight")
