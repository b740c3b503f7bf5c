"""A checkpoint that Megatron FSDP wrote on two ranks, against the whole tensors as Megatron itself gathers them."""

import re
import shutil

import numpy as np
import pytest
import torch

from tests.ckpt_compare.memory import dense
from tests.ckpt_compare.verdicts import compared, judged, kinds
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]
ITERATION = "iter_0000002"


def test_the_format_is_recognised_from_root_and_from_iteration_folder(megatron_fsdp):
    assert recognise(megatron_fsdp) == recognise(megatron_fsdp / ITERATION) == "megatron_fsdp"


def test_every_tensor_is_what_megatron_gathers(megatron_fsdp):
    gathered = torch.load(megatron_fsdp / "gathered.pt")
    held = open_checkpoint(megatron_fsdp).tensors
    wanted = {}
    for key, value in gathered.items():
        name = re.sub(r"(?:module\.)+", "", key.partition(".")[2])
        slot = re.search(r"\.(exp_avg(?:_sq)?)$", name)
        name, mark = (name[: slot.start()], f"#{slot[1]}") if slot is not None else (name, "")
        parts = zip(("_w", "_v"), value.chunk(2), strict=True) if "linear_fc1" in name else [("", value)]
        wanted |= {f"{name}{end}{mark}": part.numpy() for end, part in parts}
    assert held.keys() == wanted.keys()
    assert len(held) == 3 * 30
    for key, array in wanted.items():
        assert np.array_equal(dense(held[key]), array.view(np.uint32) if dense(held[key]).dtype == np.uint32 else array), key


def test_it_is_the_same_model_as_a_plain_file_of_the_gathered_weights(megatron_fsdp, tmp_path):
    gathered = {k: v for k, v in torch.load(megatron_fsdp / "gathered.pt").items() if k.startswith("model.")}
    torch.save({"model": {k.removeprefix("model.module."): v for k, v in gathered.items()}}, tmp_path / "plain.pt")
    found = compared(tmp_path / "plain.pt", megatron_fsdp, ["weights"])
    assert {r.verdict for r in found.rows} == {"identical"}
    assert kinds(found)["weights"] == 38
    assert "layers.3.mlp.gate.weight" in {r.key for r in found.rows}


def test_arguments_steps_and_generators_are_read(megatron_fsdp):
    checkpoint = open_checkpoint(megatron_fsdp)
    assert checkpoint.config["heads"] == 8
    assert checkpoint.state["optimizer"] == {"step": 2}
    assert checkpoint.state["iteration"] == {"iteration": 2}
    assert {"tp 0 pp 0/torch_rng_state", "tp 0 pp 0/random_rng_state"} <= checkpoint.state["rng"].keys()


def test_a_lost_file_is_named(megatron_fsdp, tmp_path):
    shutil.copytree(megatron_fsdp, tmp_path / "x")
    (tmp_path / "x" / ITERATION / "__1_0.distcp").unlink()
    found = judged(megatron_fsdp, tmp_path / "x")
    assert found.code == 3
    assert any("__1_0.distcp" in d for d in found.details)
