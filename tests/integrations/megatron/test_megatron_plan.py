"""One plan with dump, monitor, audit and configuration capture gives all four under Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpt_compare.writers.launch import launch
from tests.integrations.one_plan import assert_all_outputs, plan_file

FC2 = "decoder.layers.1.mlp.linear_fc2"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.proves("Megatron-core", "all four outputs of one plan")
def test_attach_does_all_that_the_plan_says(require, tmp_path):
    require("megatron.core")
    plan_file(tmp_path, dumped=2)
    launch(1, Path(__file__).with_name("train_planned.py"), str(tmp_path))
    assert_all_outputs(tmp_path, dumped=2, steps=[0, 1, 2, 3, 4], layer=FC2, written=(3, f"{FC2}.weight"))
