"""The audit of DeepSpeed, ZeRO 0 to 3 on two and four ranks: silent on healthy trainings, and right about planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.deepspeed.small_deepspeed import CONFIGURATIONS

FOUR = ("zero1-fp32", "zero2-bf16", "zero3-fp32")
FAULTS = [(stage, fault) for stage in range(4) for fault in ("drift", "moments", "data", "norm") if stage or fault != "norm"]
LATE = ("none", "copy")
COPIES = ("zero0-fp32", "zero1-fp32", "zero2-fp32", "zero2-bf16", "zero2-fp16")
FIRST = {"moments": "moments_present", "data": "distinct_data", "norm": "gradient_norm"}
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("deepspeed")
    folder = tmp_path_factory.mktemp("audited")
    faults = [f"zero{stage}-fp32@{fault}" for stage, fault in FAULTS]
    for ranks, names in ((2, [*CONFIGURATIONS, *faults, *(f"{name}@{how}" for name in COPIES for how in LATE)]), (4, FOUR)):
        (folder / str(ranks)).mkdir()
        script = Path(__file__).with_name("train_audited.py")
        launch(script, ranks, str(folder / str(ranks)), *names, timeout=600)
    return folder


def found(folder: Path, name: str, ranks: int = 2) -> list[list]:
    """Return what each rank found: [rule, step, name, message]."""
    return [json.loads((folder / str(ranks) / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_healthy_training_raises_no_alarm(folder, name):
    assert found(folder, name) == [[], []]


@pytest.mark.parametrize("name", FOUR)
def test_a_healthy_training_on_four_ranks_raises_no_alarm(folder, name):
    assert found(folder, name, 4) == [[]] * 4


@pytest.mark.parametrize(("stage", "fault"), [pair for pair in FAULTS if pair[1] != "drift"])
def test_a_planted_fault_is_found_on_both_ranks_at_once(folder, stage, fault):
    for told in found(folder, f"zero{stage}-fp32 {fault}"):
        assert told[0][:2] == [FIRST[fault], 3], told


@pytest.mark.parametrize("stage", range(4))
def test_a_weight_that_one_rank_writes_to_is_named(folder, stage):
    """Under ZeRO 3 nobody holds the same piece, so only the rank itself can tell."""
    other, writer = (told[:1] for told in found(folder, f"zero{stage}-fp32 drift"))
    assert writer[0][:3] == ["untouched_between_steps", 3, "fc2.weight"]
    assert [finding[:3] for finding in other] == ([] if stage == 3 else [["replicas", 3, "fc2.weight"]])


@pytest.mark.parametrize("name", COPIES)
def test_what_a_rank_writes_to_its_copy_between_steps_that_are_not_audited_is_named(folder, name):
    """Under ZeRO 1 and 2 it lives one step, until the weights are gathered again."""
    other, writer = found(folder, f"{name} copy")
    assert [finding[:3] for finding in writer if finding[0] == "written_between_steps"] == [
        ["written_between_steps", 34, "fc2.weight"]
    ]
    assert name == "zero0-fp32" or other == []
    assert found(folder, f"{name} none") == [[], []]
