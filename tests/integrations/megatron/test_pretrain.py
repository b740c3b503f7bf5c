"""The trainer's loop: the flag, the line at startup, and an adaptor that patches Megatron by name, before or after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from trainprobe.engine.storage.dumps.record_log import decode

WAYS = [
    "off",
    "flag",
    "passive",
    "install",
    "script",
    "patched",
    "before",
    "after",
    "feature",
    "flag resumed",
    "script resumed",
]
WATCHED = ["flag", "install", "script", "before", "after", "feature"]
PATCHED = ["patched", "before", "after", "feature"]
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def told(require, tmp_path_factory) -> dict[str, dict]:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("pretrain")
    launch(Path(__file__).with_name("pretrain.py"), 1, str(folder), *WAYS)
    return {way: json.loads((folder / f"{way}.json").read_text()) for way in WAYS}


@pytest.mark.proves("Megatron-core", {"flag": "--probe-plan", "script": "a script that is not edited", "install": "attach"})
@pytest.mark.parametrize("way", [way for way in WAYS if "resumed" not in way])
def test_the_training_is_the_same_whoever_watches(told, way):
    assert (told[way]["log"], told[way]["weights"]) == (told["off"]["log"], told["off"]["weights"])


@pytest.mark.parametrize("way", WATCHED)
def test_steps_are_numbered_as_in_the_trainers_log(told, way):
    assert [decode(line.encode()).step for line in told[way]["records"]] == [1, 2, 3]


@pytest.mark.parametrize("way", WATCHED)
def test_what_the_trainer_reports_is_noted_as_reported(told, way):
    for line, logged in zip(told[way]["records"], told["off"]["log"], strict=True):
        scalars = decode(line.encode()).scalars
        assert scalars["lm loss"] == pytest.approx(logged["loss"], rel=1e-7)
        assert scalars["reported_grad_norm"] == scalars["grad_norm"] == logged["grad_norm"]
        assert scalars["reported_learning_rate"] == logged["lr"], "of the next step, as the scheduler has stepped"
        assert scalars["lr"] == 2 * logged["lr"], "that this step was made with"


@pytest.mark.parametrize("way", WATCHED)
def test_every_moment_is_seen_in_every_way(told, way):
    for line in told[way]["records"]:
        moments = {call.node for call in decode(line.encode()).calls if call.kind == "state"}
        assert moments == {"unreduced", "unclipped", "before_step", "after_step"}


@pytest.mark.parametrize("way", ["passive", "patched", "off"])
def test_without_the_flag_and_the_line_nothing_is_watched(told, way):
    assert told[way]["records"] == []


@pytest.mark.proves("MindSpeed", "its rules of patching only (MindSpeed itself needs an NPU)")
@pytest.mark.parametrize("way", PATCHED)
def test_an_adaptor_that_patches_by_name_keeps_its_patches_in_either_order(told, way):
    assert told[way]["called"] == told["patched"]["called"] != []


@pytest.mark.parametrize("way", WAYS)
def test_the_trainer_has_its_own_functions_back_when_it_has_trained(told, way):
    assert told[way]["left"] == []
    assert told[way]["own"] == told["off"]["own"]


@pytest.mark.proves("Megatron-core", "resume")
def test_a_resumed_run_goes_on_with_its_numbers(told):
    assert [decode(line.encode()).step for line in told["flag resumed"]["records"]] == [2, 3]


def test_a_run_of_trainprobe_run_that_is_resumed_goes_on_in_the_earlier_folder(told):
    """It was written next to that: `trainprobe run` cannot know that the program will load a checkpoint."""
    again = told["script resumed"]
    assert [decode(line.encode()).step for line in again["records"]] == [1, 2, 3, 4, 5]
    assert not again["written"]
    assert again["kept"] == ["rules_step3.json", "rules_step5.json"]


def test_what_the_rules_remember_is_kept_with_a_checkpoint(told):
    assert told["flag"]["kept"] == [f"rules_step{len(told['flag']['log'])}.json"]
    assert told["off"]["kept"] == []


def test_evaluation_is_no_step(told):
    """The trainer evaluates after every step: its forward is in none of them."""
    for line in told["flag"]["records"]:
        assert decode(line.encode()).scalars["micro_batches"] == 2
