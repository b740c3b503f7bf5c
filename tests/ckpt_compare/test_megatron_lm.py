"""A checkpoint that Megatron-LM itself wrote: its parsed arguments, its `pretrain`, its `save_checkpoint`.

`megatron.training` is in no package, so the file is kept. Megatron-LM core_v0.16.1 wrote it on a CPU, by hand (see
`writers/write_megatron_lm.py`), after three steps of a model with three layers of 48, six heads in two groups, SwiGLU of 72,
119 words padded to 120.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise

SAVED = Path(__file__).parent / "data" / "megatron_lm"
FILE = SAVED / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"


def test_all_parsed_arguments_are_there_as_data():
    found = open_checkpoint(SAVED)
    assert (found.format, found.problems, found.warnings) == ("megatron_legacy", (), ())
    args = found.state["args"]
    assert len(args) > 600
    assert (args["exit_signal"], args["exit_signal_handler"]) == ("Signals(15)", True)
    assert (args["num_layers"], args["ffn_hidden_size"], args["padded_vocab_size"]) == (3, 72, 120)
    assert (found.state["iteration"]["iteration"], found.state["optimizer"]["step"]) == (3, 3)


def test_its_model_and_moments_have_logical_names():
    found = compared(SAVED, SAVED)
    assert recognise(SAVED) == recognise(SAVED / "iter_0000003") == "megatron_legacy"
    assert {r.verdict for r in found.rows} == {"identical"}
    names = {r.key for r in found.rows if r.what == "weights"}
    assert len(names) == 3 + 3 * 9
    assert {r.key for r in found.rows if r.what == "optimizer"} == {
        f"{n}#{s}" for n in names for s in ("exp_avg", "exp_avg_sq")
    }
    shapes = {r.key: r.shape_a for r in found.rows}
    assert (shapes["layers.2.attention.q.weight"], shapes["layers.2.attention.k.weight"]) == ((48, 48), (16, 48))


@pytest.mark.frameworks
def test_its_numbers_are_those_that_torch_loads(require):
    require("megatron.core")  # whose enumerations the arguments hold
    theirs = torch.load(FILE, weights_only=False, map_location="cpu")["model"]
    held = open_checkpoint(SAVED).tensors
    loaded = {k: v for k, v in theirs.items() if isinstance(v, torch.Tensor)}
    assert len(loaded) > 20
    for name, value in loaded.items():
        whole = np.zeros(held[name].shape, np.float32)
        for piece in held[name].pieces:  # gate and up are two
            whole[piece.rectangle.within((0,) * whole.ndim)] = piece.source.load()
        assert np.array_equal(whole, value.numpy()), name


def test_one_changed_moment_is_found(tmp_path):
    shutil.copytree(SAVED, tmp_path / "changed")
    changed = tmp_path / "changed" / FILE.relative_to(SAVED)
    raw = bytearray(FILE.read_bytes())
    moment = open_checkpoint(SAVED).tensors["decoder.final_layernorm.weight#exp_avg"].pieces[0].source
    raw[moment.start + 7] ^= 0x40
    changed.write_bytes(raw)
    found = judged(SAVED, tmp_path / "changed")
    assert found.code == 2
    assert "worst is final_norm.weight#exp_avg" in found.sentence
