"""Files that MindSpore 2.10 wrote (see writers/write_mindspore.py), read without it."""

import shutil
from pathlib import Path

import numpy as np

from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint

DATA = Path(__file__).parent / "data" / "mindspore"


def test_every_tensor_is_what_mindspore_itself_reads():
    expected = np.load(DATA / "adam.npz")
    found = open_checkpoint(DATA / "adam.ckpt").tensors.values()
    assert len(found) == 12
    assert all(np.array_equal(t.pieces[0].source.load(), expected[t.native or t.name]) for t in found)


def test_the_two_file_formats_hold_the_same():
    found = judged(DATA / "adam.ckpt", DATA / "adam.safetensors")
    assert (found.code, found.sentence.split(":")[0]) == (0, "identical")


def test_bfloat16_weights_are_the_float32_ones_within_rounding():
    found = compared(DATA / "adam.ckpt", DATA / "half.ckpt")
    assert {r.verdict for r in found.rows} == {"rounding"}
    assert all(r.difference.max_ulp <= 0.5 for r in found.rows)


def test_training_counters_are_state():
    assert open_checkpoint(DATA / "adam.ckpt").state["optimizer"] == {"step": 2}


def test_a_flipped_byte_is_noticed_by_the_checksum(tmp_path):
    spoiled = bytearray((DATA / "adam.ckpt").read_bytes())
    spoiled[300] ^= 1
    (tmp_path / "adam.ckpt").write_bytes(spoiled)
    assert any("checksum" in p.message for p in open_checkpoint(tmp_path / "adam.ckpt").problems)


def test_rank_folders_are_copies_that_must_agree(tmp_path):
    for rank, name in ((0, "adam.ckpt"), (1, "adam.ckpt")):
        (tmp_path / f"rank_{rank}").mkdir()
        shutil.copy(DATA / name, tmp_path / f"rank_{rank}" / "net-1_2.ckpt")
    assert judged(tmp_path, DATA / "adam.ckpt").code == 0
    found = compared(tmp_path, DATA / "adam.ckpt")
    assert found.a.tensors["fc1.weight"].pieces[1].replica == "rank_1"


def ranks(folder, *names):
    """Lay files out as MindFormers does, with a strategy file beside them that says how they were cut."""
    for rank, name in enumerate(names):
        (folder / "checkpoint" / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(DATA / name, folder / "checkpoint" / f"rank_{rank}" / "net-1_2.ckpt")
    (folder / "strategy").mkdir()
    (folder / "strategy" / "ckpt_strategy_rank_0.ckpt").touch()
    return folder / "checkpoint"


def test_ranks_that_a_strategy_has_cut_are_no_copies_and_are_compared_one_by_one(tmp_path):
    one, two = (ranks(tmp_path / name, "adam.ckpt", "half.ckpt") for name in ("one", "two"))
    same = judged(one, two)
    assert same.code == 0
    assert any("ckpt_strategy_rank_0.ckpt, which is not read" in d for d in same.details)
    assert judged(one, ranks(tmp_path / "three", "adam.ckpt", "adam.ckpt")).code != 0


def test_ranks_that_a_strategy_has_cut_do_not_pass_for_a_whole_checkpoint(tmp_path):
    assert judged(ranks(tmp_path, "adam.ckpt", "adam.ckpt"), DATA / "adam.ckpt", ["weights"]).code == 3
