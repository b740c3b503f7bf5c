"""One plan with dump, monitor, audit and configuration capture gives all four under Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.monitor_files import assert_written, write_config
from tests.integrations.one_plan import assert_all_outputs, plan_file

FC2 = "decoder.layers.1.mlp.linear_fc2"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.proves("Megatron-core", "all four outputs of one plan")
def test_attach_does_all_that_the_plan_says(require, tmp_path):
    require("megatron.core")
    plan_file(tmp_path, dumped=2)
    launch(Path(__file__).with_name("train_planned.py"), 1, str(tmp_path))
    assert_all_outputs(tmp_path, dumped=2, steps=[0, 1, 2, 3, 4], layer=FC2, written=(3, f"{FC2}.weight"))


def test_a_plan_may_name_what_one_stage_of_a_pipeline_holds(require, tmp_path):
    require("megatron.core")
    launch(Path(__file__).with_name("train_one_stage.py"), 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in range(2))
    layer = "decoder.layers.3.mlp"
    for told, stage, fields in ((first, 0, ("modules", "activations", "gradients")), (second, 1, ("activations",))):
        assert [severity for severity, _ in told] == ["warning"] * len(fields)
        for (_, message), field in zip(told, fields, strict=True):
            assert field in message
            assert f"stage {stage} of a pipeline of 2" in message
    dumped = [step.name for rank in range(2) for step in (tmp_path / "out").glob(f"step*/rank{rank}")]
    assert "rank1" in dumped
    data = json.loads((tmp_path / "out" / "step1" / "rank1" / "dump.json").read_text())["data"]
    assert data and all(layer in name for name in data)


def test_trainer_mon_writes_its_files(require, tmp_path):
    require("megatron.core")
    write_config(tmp_path)
    launch(Path(__file__).with_name("train_trainer_mon.py"), 1, str(tmp_path))
    assert_written(tmp_path, steps=[0, 1], parameter=f"{FC2}.weight")
