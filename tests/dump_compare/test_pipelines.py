"""Pipelines of torch.distributed.pipelining are pipeline parallel, and what they run to learn shapes is no micro-batch."""

from __future__ import annotations

import json

import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_pipeline
from trainprobe.cli import main

SEVERAL_STAGES = [f"Schedule{kind}" for kind in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    for ranks, level, change in [
        (1, "L0", ""),
        (1, "mix", ""),
        (2, "L0", ""),
        (2, "L0", "mesh"),
        (2, "L0", "fault"),
        (2, "mix", ""),
        *((2, "L0", schedule) for schedule in SEVERAL_STAGES),
        (2, "L0", "ScheduleZBVZeroBubble-fault"),
    ]:
        launch(train_pipeline.__file__, ranks, str(folder / f"{ranks}{level}{change}"), level, change)
    launch(train_pipeline.__file__, 4, str(folder / "4L0"), "L0")
    return folder


@pytest.mark.parametrize(("split", "whole"), [("2L0", "1L0"), ("2L0mesh", "1L0"), ("2mix", "1mix")])
def test_a_pipeline_agrees_with_one_process(split, whole, runs, capsys):
    assert main(["dump-compare", str(runs / whole), str(runs / split)]) in (0, 1)
    said = capsys.readouterr().out
    assert "A is 1 rank and B is PP2: the shards of each tensor were joined" in said
    assert "micro-batches hold other samples" not in said


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_a_rank_with_several_stages_agrees_with_one_process(schedule, runs, capsys):
    """Zero-bubble schedules take gradients of weights apart from those of inputs; ZBV gives the last rank the middle stages."""
    places = [json.loads((runs / f"2L0{schedule}" / "step0" / f"rank{i}" / "dump.json").read_text()) for i in range(2)]
    assert [each["trainprobe"]["place"]["axes"] for each in places] == [{"pp": [i, 2], "vpp": [0, 2]} for i in range(2)]
    for each in places:
        forwards = [name for name in each["data"] if ".Model.forward." in name]
        assert sorted(forwards) == [f"Module.{chunk}.Model.forward.{i}" for chunk in (0, 1) for i in (0, 1)]
    assert main(["dump-compare", str(runs / "1L0"), str(runs / f"2L0{schedule}")]) in (0, 1)
    said = capsys.readouterr().out
    assert "A is 1 rank and B is PP2 VPP2: the shards of each tensor were joined" in said
    assert "micro-batches hold other samples" not in said


def test_another_weight_of_the_last_virtual_stage_is_named(runs, capsys):
    assert main(["dump-compare", str(runs / "1L0"), str(runs / "2L0ScheduleZBVZeroBubble-fault")]) == 2
    assert "the first difference is at Module.layers.3.0.Linear.forward.0 (step 0, micro-batch 0): the weights differ" in (
        capsys.readouterr().out
    )


def test_what_a_stage_runs_to_learn_shapes_is_left_out(runs):
    data = json.loads((runs / "2L0" / "step0" / "rank1" / "dump.json").read_text())["data"]
    assert [name for name in data if name.startswith("Module.root.Model.forward")] == [
        f"Module.root.Model.forward.{i}" for i in (0, 1)
    ]


def test_another_weight_of_the_last_stage_is_named(runs, capsys):
    assert main(["dump-compare", str(runs / "1L0"), str(runs / "2L0fault")]) == 2
    assert "the first difference is at Parameter.layers.3.0.weight (step 0): the weights differ" in capsys.readouterr().out


def test_two_pipelines_are_data_parallel_whatever_their_ranks(runs, capsys):
    places = [
        json.loads((runs / "4L0" / "step0" / f"rank{i}" / "dump.json").read_text())["trainprobe"]["place"]["axes"]
        for i in range(4)
    ]
    assert places == [{"dp": [i % 2, 2], "pp": [i // 2, 2]} for i in range(4)]
    assert main(["dump-compare", str(runs / "1L0"), str(runs / "4L0")]) in (0, 1)
    assert "B is DP2 PP2" in capsys.readouterr().out
