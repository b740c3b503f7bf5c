"""Packs of mindstudio-probe are read and compared with each other and with ours."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from trainprobe.config_check import ConfigChecker
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.errors import FormatError

STATISTICS = {"max": 1.0, "min": -1.0, "mean": 0.25, "norm": 3.0}


def theirs(path: Path, lr: str = "1e-4", norm: float = 3.0, more: str = "", **environment: str) -> Path:
    """Write a pack in the layout that version 26 of that tool writes."""
    members = {
        "env": json.dumps({"NCCL_ALGO": "Ring", "HF_TOKEN": "secret", **environment}),
        "pip": f"torch=2.13.0\nmegatron_core=0.16.1\n{more}",
        "hyperparameters/hyperparameters_static.json": json.dumps({"train.sh": {"lr": lr, "bf16": True}}),
        "hyperparameters/hyperparameters_dynamic.json": json.dumps({"lr": float(lr), "seed": 1}),
        "dataset/step0/rank0/dataset.json": json.dumps({"args": {"0": STATISTICS}, "kwargs": {"labels": STATISTICS}}),
        "weights/step0/rank0/weight.json": json.dumps({"fc.weight": {**STATISTICS, "norm": norm}}),
        "random/rank0.json": json.dumps({"torch.rand": [{"count": 2, "stack": ["a", "b"]}]}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_their_pack_is_read_without_its_secrets(tmp_path):
    pack = read_pack(theirs(tmp_path / "a.zip"))
    assert pack.origin == "mindstudio-probe"
    rank = pack.ranks[0]
    assert rank.single["environment"]["variables"] == {"NCCL_ALGO": "Ring"}
    assert rank.single["environment"]["withheld"] == ["HF_TOKEN"]
    assert rank.single["packages"]["distributions"] == {"torch": "2.13.0", "megatron-core": "0.16.1"}
    assert set(rank.by_micro["dataset"][0]["tensors"]) == {"args.0", "labels"}


def test_two_equal_packs_of_theirs_pass(tmp_path):
    assert compare_packs(read_pack(theirs(tmp_path / "a.zip")), read_pack(theirs(tmp_path / "b.zip"))).exit_code == 0


def test_what_differs_between_two_of_theirs_is_named(tmp_path):
    bench = read_pack(theirs(tmp_path / "a.zip"))
    assert (
        compare_packs(bench, read_pack(theirs(tmp_path / "b.zip", lr="3e-4"))).sentence
        == "learning rate differs: 1e-4 and 3e-4"
    )
    sentence = compare_packs(bench, read_pack(theirs(tmp_path / "c.zip", norm=3.1))).sentence
    assert sentence == "weight fc.weight differs from the start: norm 3 and 3.1"


def test_packages_that_compute_nothing_explain_no_weights(tmp_path):
    bench = read_pack(theirs(tmp_path / "a.zip"))
    found = compare_packs(bench, read_pack(theirs(tmp_path / "b.zip", norm=3.1, more="contourpy=1.3\ncycler=0.12\n")))
    assert found.sentence.startswith("weight fc.weight differs from the start: norm 3 and 3.1; contourpy differs")


@pytest.mark.parametrize("weight", [0.0, 0.5], ids=["the same", "another weight"])
def test_what_their_pack_does_not_hold_is_no_difference(tmp_path, weight):
    mine = ours(tmp_path / "ours.zip", weight)
    their = read_pack(REAL)
    for rank in their.ranks.values():
        del rank.single["hyperparameters"]
        rank.single["packages"] = mine.ranks[0].single["packages"]  # that machine had others
    for sides in ((their, mine), (mine, their)):
        found = compare_packs(*sides)
        checks = {check.name: check for check in found.checks}
        assert (checks["hyperparameters"].compared, checks["hyperparameters"].verdict) == (False, "pass")
        assert checks["hyperparameters"].findings[0].text.endswith("as the pack of mindstudio-probe holds none")
        assert found.sentence.startswith("weight 0.weight differs from the start") == bool(weight), found.sentence


@pytest.mark.parametrize("member", ["env", "weights/step0/rank0/weight.json"])
def test_a_member_of_another_kind_is_refused(tmp_path, member):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "[1, 2]")
    with pytest.raises(FormatError, match="where an object belongs"):
        read_pack(path)


REAL = Path(__file__).parent / "fixtures/msprobe_26.2.0.zip"  # written by that tool; its environment was cut down afterwards


def test_a_pack_that_their_tool_has_written_is_read():
    pack = read_pack(REAL)
    rank = pack.ranks[0]
    assert set(rank.by_micro["weights"][1]["parameters"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert rank.single["environment"]["withheld"] == ["WANDB_API_KEY"]
    assert [c["function"] for c in rank.single["randomness"]["calls"]] == ["torch.manual_seed", "torch.randn"]
    assert rank.single["hyperparameters"]["sources"][0]["values"] == {"lr": "1e-4", "bf16": True}


def ours(path, weight: float = 0.0):
    ConfigChecker.apply_patches(on_error="raise")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[0].weight.data[0, 0] += weight  # pyright: ignore[reportArgumentType]
    with ConfigChecker(net, output_zip_path=path, on_error="raise"):
        for _ in range(2):
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    return read_pack(path)


def test_data_and_weights_of_the_same_training_captured_by_both_tools_are_equal(tmp_path):
    comparison = compare_packs(read_pack(REAL), ours(tmp_path / "ours.zip"))
    checks = {check.name: check for check in comparison.checks}
    randomness = checks["randomness"]  # that tool counts other calls: "called 1 time and 0 times" would say nothing
    assert (randomness.compared, randomness.verdict) == (False, "pass")
    assert "mindstudio-probe counts fewer functions" in randomness.findings[0].text
    assert "randomness" not in comparison.sentence.partition("(")[0]
    assert (checks["dataset"].verdict, len(checks["dataset"].rows)) == ("pass", 2)
    assert (checks["weights"].verdict, len(checks["weights"].rows)) == ("pass", 8)
