"""Checkpoints that DeepSpeed wrote: the same weights and moments in every stage, against what DeepSpeed itself gathers."""

import shutil

import pytest
import torch

from tests.ckpt_compare.verdicts import compared, judged, kinds
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.parametrize(
    ("a", "b", "optimizer"),
    [
        ("two/zero1", "two/zero0", 16),
        ("two/zero1", "two/zero2", 24),
        ("two/zero1", "two/zero3", 24),
        ("two/zero1", "one/zero1", 24),
        ("two/zero3", "one/zero3", 24),
        ("one/zero0", "two/zero3", 16),
        ("two/zero2", "universal/zero2", 24),
        ("two/zero3", "universal/zero3", 24),
    ],
)
def test_every_stage_and_number_of_ranks_holds_the_same_bits(deepspeed, a, b, optimizer):
    found = compared(deepspeed / a, deepspeed / b)
    assert [(r.key, r.verdict) for r in found.rows if r.verdict != "identical"] == []
    assert (kinds(found), found.faults) == ({"weights": 8, "optimizer": optimizer}, ())


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_weights_are_those_that_deepspeed_itself_gathers(deepspeed, stage):
    assert judged(deepspeed / f"two/{stage}", deepspeed / f"two/{stage}.fp32.pt").code == 0


def test_bfloat16_weights_are_the_fp32_masters_within_rounding(deepspeed):
    found = compared(deepspeed / "two/zero1-bf16", deepspeed / "two/zero3-bf16")
    assert {r.verdict for r in found.rows if r.what == "weights"} == {"rounding"}
    assert {r.verdict for r in found.rows if r.what == "optimizer"} == {"identical"}


def test_a_pipeline_of_two_stages_holds_the_weights_of_one(deepspeed):
    found = compared(deepspeed / "two/pipe1", deepspeed / "two/pipe2", ["weights"])
    assert {r.verdict for r in found.rows} == {"identical"}
    assert not found.faults


def test_both_stages_of_a_pipeline_hold_the_same_moments_for_a_tied_layer(deepspeed):
    assert open_checkpoint(deepspeed / "two/pipe2").tensors["tied_modules.emb.weight#exp_avg"].count == 88
    assert not compared(deepspeed / "two/pipe2", deepspeed / "two/pipe2").faults


@pytest.mark.parametrize("stage", [0, 1])
def test_experts_stand_under_their_global_numbers(deepspeed, stage):
    held = open_checkpoint(deepspeed / f"two/moe{stage}").tensors
    for rank in (0, 1):
        oracle = torch.load(deepspeed / f"two/moe{stage}.rank{rank}.pt")
        for name, value in oracle.items():
            if "deepspeed_experts." in name:
                local = int(name.split("deepspeed_experts.")[1].split(".")[0])
                name = name.replace(f"deepspeed_experts.{local}", f"deepspeed_experts.{local + 2 * rank}")
            assert (held[name].pieces[0].source.load() == value.detach().numpy()).all(), name


def test_the_master_weights_of_experts_are_their_weights(deepspeed):
    held = open_checkpoint(deepspeed / "two/moe1").tensors
    names = [k for k in held if "deepspeed_experts" in k and "#" not in k]
    assert len(names) == 16
    for name in names:
        flat = torch.cat([torch.from_numpy(p.source.load().copy()).flatten() for p in held[f"{name}#master"].pieces])
        assert torch.equal(flat, torch.from_numpy(held[name].pieces[0].source.load().copy()).flatten())


TIED = ["two/tied0", "two/tied1", "two/tied2", "two/tied3", "one/tied0", "one/tied3", "universal/tied2", "universal/tied3"]


@pytest.mark.parametrize("name", TIED)
def test_a_shared_parameter_and_buffers_are_whole_in_every_stage(deepspeed, name):
    """Each stage sums the gradients of a shared parameter in another order: the last bits differ, and nothing is missing."""
    found = compared(deepspeed / "two/tied1", deepspeed / name)
    names = {"embedding.weight", "head.weight", "inner.weight", "inner.bias", "seen"}
    assert {r.key for r in found.rows if r.what == "weights"} == names
    assert {r.verdict for r in found.rows} <= {"identical", "rounding", "differ"}
    assert all(r.difference.relative_l2 < 1e-6 for r in found.rows)
    assert {r.key.partition("#")[0] for r in found.rows if r.what == "optimizer"} == names - {"head.weight", "seen"}
    assert found.faults == ()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("two/tied2", "universal/tied2"),
        ("two/tied3", "universal/tied3"),
        ("two/tied3", "one/tied3"),
        ("two/tied0", "one/tied0"),
    ],
)
def test_shared_parameters_and_buffers_keep_every_bit_when_they_are_relaid(deepspeed, a, b):
    assert judged(deepspeed / a, deepspeed / b).code == 0


@pytest.mark.parametrize("stage", ["tied1", "tied2", "tied3"])
def test_shared_parameters_are_those_that_deepspeed_itself_gathers(deepspeed, stage, tmp_path):
    gathered = torch.load(deepspeed / f"two/{stage}.fp32.pt")
    assert set(gathered) == {"embedding.weight", "inner.weight", "inner.bias"}  # DeepSpeed gathers a shared parameter once
    torch.save({**gathered, "seen": torch.tensor([3.0, 0.0, 0.0])}, tmp_path / "gathered.pt")
    assert judged(deepspeed / f"two/{stage}", tmp_path / "gathered.pt").code == 0


def test_formats_are_recognised(deepspeed):
    assert recognise(deepspeed / "two/zero3") == recognise(deepspeed / "two/zero3/global_step3") == "deepspeed"
    assert recognise(deepspeed / "universal/zero2") == "deepspeed_universal"


def test_a_lost_optimizer_file_is_named_with_what_nobody_holds(deepspeed, tmp_path):
    shutil.copytree(deepspeed / "two/zero1", tmp_path / "x")
    (tmp_path / "x/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    found = judged(deepspeed / "two/zero3", tmp_path / "x")
    assert found.code == 3
    assert any("optimizer file of data-parallel rank 1" in d for d in found.details)
    assert any("B: no file holds" in d for d in found.details)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("zero1", "optim"), ("zero2", "optim"), ("zero3", "optim"), ("zero1-bf16", "optim"), ("zero3", "model")],
)
def test_a_file_of_another_save_is_named_by_the_steps_that_it_counts(deepspeed, stage, kind, tmp_path):
    """Both sides are the same files, so that only the counts of neighbours can tell."""
    folder = tmp_path / stage
    shutil.copytree(deepspeed / "two" / stage, folder)
    assert not open_checkpoint(folder).problems
    file = next(f for f in folder.glob(f"*/*{kind}_states.pt") if "zero_pp_rank_1_" in f.name)
    content = torch.load(file, weights_only=False)
    if kind == "model":
        content["global_steps"] = 1
    else:
        assert count_steps_from(content, 1)
    torch.save(content, file)
    assert [(p.where, "of another save" in p.message) for p in open_checkpoint(folder).problems] == [(file.name, True)]
    assert judged(folder, folder).code != 0


def count_steps_from(content, number: int) -> bool:
    """Set each count of steps; return whether there was one."""
    found = False
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key == "step":
            content[key] = torch.full_like(value, number) if isinstance(value, torch.Tensor) else number
            found = True
        elif isinstance(value, dict | list):
            found |= count_steps_from(value, number)
    return found
