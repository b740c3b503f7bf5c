"""Collectives in the monitor, of two real ranks: which, how large, in which group, and the norms before and after."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch

SCRIPT = Path(__file__).with_name("train_collectives.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    for names in ("all", "broadcast", "off"):
        launch(SCRIPT, 2, str(folder), names)
    return folder


def of(folder, names, rank):
    return json.loads((folder / f"{names}.{rank}.json").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_what_goes_in_and_comes_out_is_what_numpy_says(folder, rank):
    told = of(folder, "all", rank)
    reduces = [call for step in told["seen"] for call in step if call["name"] == "Distributed.all_reduce"]
    assert len(reduces) == len(told["wanted"]) == 12
    for call, wanted in zip(reduces, told["wanted"], strict=True):
        assert call["group"] == [0, 1]
        assert call["in"] == [pytest.approx(wanted["in"], rel=1e-6)]
        assert call["out"] == [pytest.approx(wanted["out"], rel=1e-6)]
    assert [call["shapes"] for call in told["seen"][0]] == [[[6, 5]], [[6]], [[2, 6]], [[2]], [[3]]]


def test_what_comes_out_is_the_same_on_both_ranks(folder):
    out = [[call["out"] for step in of(folder, "all", rank)["seen"] for call in step] for rank in (0, 1)]
    assert out[0] == out[1]


def test_names_choose(folder):
    assert [[call["name"] for call in step] for step in of(folder, "broadcast", 0)["seen"]] == [["Distributed.broadcast"]] * 3


def test_no_bit_changes(folder):
    digests = {of(folder, names, rank)["digest"] for names in ("all", "broadcast", "off") for rank in (0, 1)}
    assert len(digests) == 1


def test_a_wrapper_whose_collectives_cannot_be_seen_is_told():
    from trainprobe.engine.capture.collectives import CollectiveTap
    from trainprobe.engine.core.guard import Guard

    class DistributedDataParallel(torch.nn.Module):
        pass

    tap = CollectiveTap(1, Guard("raise"), None, [])
    tap.open(torch.nn.Linear(1, 1))
    assert not tap.notes
    tap.open(DistributedDataParallel())
    assert any("gradients: {unreduced: true}" in note for note in tap.notes)
