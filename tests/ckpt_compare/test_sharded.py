"""FSDP, tensor-parallel DTensors and Lightning's sharded strategy, as torch.distributed.checkpoint writes them."""

import shutil

import numpy as np
import pytest
import torch

from tests.ckpt_compare.memory import dense
from tests.ckpt_compare.verdicts import compared, judged, kinds
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.parametrize(
    ("other", "optimizer"),
    [("fsdp1_sharded", 16), ("fsdp2", 16), ("fsdp2_joined.pt", 16), ("tensor", 0), ("lightning.ckpt", 16)],
)
def test_a_sharded_checkpoint_is_identical_to_the_plain_file(sharded, other, optimizer):
    found = compared(sharded / "plain.pt", sharded / other)
    assert [(r.key, r.verdict) for r in found.rows if r.verdict != "identical"] == []
    assert (kinds(found), found.faults) == ({"weights": 8, "optimizer": optimizer}, ())


def test_a_full_checkpoint_of_the_older_fsdp_holds_the_weights_of_the_plain_file(sharded):
    found = compared(sharded / "plain.pt", sharded / "fsdp1_full.pt", ["weights"])
    assert {r.verdict for r in found.rows} == {"identical"}
    assert len(found.rows) == 8


def test_a_full_optimizer_state_of_the_older_fsdp_is_read_by_name_as_torch_reads_it(sharded):
    """Not against the plain file: torch 2.13 gathers wrong exp_avg on CPU ranks (it stores exp_avg_sq twice)."""
    held = open_checkpoint(sharded / "fsdp1_full.pt")
    states = torch.load(sharded / "fsdp1_full.pt")["optimizer"]["state"]
    wanted = {f"{n}#{slot}": s[slot].numpy() for n, s in states.items() for slot in ("exp_avg", "exp_avg_sq")}
    assert {k for k in held.tensors if "#" in k} == wanted.keys()
    assert all(np.array_equal(dense(held.tensors[k]).view(np.float32), v) for k, v in wanted.items())
    optimizer = held.state["optimizer"]
    group = torch.load(sharded / "fsdp1_full.pt")["optimizer"]["param_groups"][0]
    assert (optimizer["step"], optimizer["lr"]) == (3, group["lr"])


def test_formats_are_recognised(sharded):
    assert [recognise(sharded / n) for n in ("plain.pt", "fsdp2", "lightning.ckpt")] == [
        "plain_torch",
        "torch_dcp",
        "lightning",
    ]


def test_a_truncated_shard_is_named(sharded, tmp_path):
    shutil.copytree(sharded / "fsdp2", tmp_path / "x")
    file = tmp_path / "x/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    found = judged(sharded / "plain.pt", tmp_path / "x")
    assert found.code == 3
    assert any("__1_0.distcp" in d for d in found.details)


def test_one_changed_byte_in_one_shard_is_named_and_located(sharded, tmp_path):
    shutil.copytree(sharded / "fsdp2", tmp_path / "x")
    file = tmp_path / "x/__1_0.distcp"
    weight = torch.load(sharded / "plain.pt")["model"]["fc2.weight"]
    row = weight[12].numpy().tobytes()  # rows 7 to 12 are rank 1's
    whole = file.read_bytes()
    assert whole.count(row) == 1
    spoiled = bytearray(whole)
    spoiled[whole.index(row) + 4 * 3 + 3] ^= 0x01  # element 3, exponent
    file.write_bytes(bytes(spoiled))
    found = judged(sharded / "plain.pt", tmp_path / "x")
    assert found.code == 2
    assert "fc2.weight" in found.sentence
    assert "[12, 3]" in found.sentence
    assert "__1_0.distcp" in found.sentence
