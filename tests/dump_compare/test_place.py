"""The position of a rank on the parallel axes: told by `place=`, or by Megatron's parallel state, in a plain watched loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainprobe
from tests.distributed.launch import launch
from tests.dump_compare import train_on_axes
from trainprobe.cli import main
from trainprobe.errors import UsageError


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axes")
    launch(train_on_axes.__file__, 1, str(folder / "whole"))
    for change in ("", "shard", "silent"):
        launch(train_on_axes.__file__, 4, str(folder / f"split{change}"), change)
    return folder


def test_a_layout_of_two_axes_that_is_told_agrees_with_one_rank(by_hand, capsys):
    assert main(["dump-compare", str(by_hand / "whole"), str(by_hand / "split")]) in (0, 1)
    assert "A is 1 rank and B is DP2 TP2: the shards of each tensor were joined" in capsys.readouterr().out
    head = json.loads((by_hand / "split" / "step0" / "rank3" / "dump.json").read_text())["trainprobe"]
    assert head["place"]["axes"] == {"dp": [1, 2], "tp": [1, 2]}


def test_another_shard_is_named_by_its_weight(by_hand, capsys):
    assert main(["dump-compare", str(by_hand / "whole"), str(by_hand / "splitshard")]) == 2
    assert "the first difference is at Parameter.up.weight (step 0): the weights differ" in capsys.readouterr().out


def test_without_it_the_shards_are_no_copies_of_each_other(by_hand, capsys):
    assert main(["dump-compare", str(by_hand / "whole"), str(by_hand / "splitsilent")]) == 2


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"tp": (2, 2)}, r"tp is \(2, 2\)"),
        ({"tp": 2}, "tp is 2"),
        ({"xp": (0, 2)}, "'xp' is no parallel axis"),
        ({"dp": (0, 3)}, "rank 0 of 4 cannot be split as dp3"),
    ],
)
def test_a_place_that_cannot_be_is_refused(axes, said, tmp_path):
    with (
        pytest.raises(UsageError, match=said),
        trainprobe.watch(torch.nn.Linear(2, 2), output=tmp_path, place=trainprobe.Place(0, 4, axes)),
    ):
        raise AssertionError


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("train_megatron_watched.py")  # not imported: it puts stand-ins in the place of functions
    launch(script, 1, str(folder), "alone")
    launch(script, 2, str(folder), "tp2", "tp2!decoder.layers.2.mlp.linear_fc1.weight", "pp2")
    return folder


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_megatron_in_a_plain_watch_is_joined_as_its_parallel_state_says(layout, megatron, capsys):
    assert main(["dump-compare", str(megatron / "alone"), str(megatron / layout)]) == 1
    assert f"A is 1 rank and B is {layout.upper()}: the shards of each tensor were joined" in capsys.readouterr().out


def test_a_changed_shard_of_megatron_in_a_plain_watch_is_named(megatron, capsys):
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    assert main(["dump-compare", str(megatron / "alone"), str(megatron / f"tp2!{name}")]) == 2
    assert f"the first difference is at Parameter.{name} (step 0): the weights differ" in capsys.readouterr().out
