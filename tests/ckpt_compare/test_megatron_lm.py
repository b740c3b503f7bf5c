"""Checkpoints that Megatron-LM itself wrote: its parsed arguments, its `pretrain`, its `save_checkpoint`.

Files of core_v0.16.1 are kept, which has no `megatron.training` in its package: its sources wrote them on a CPU, by hand (see
`writers/write_megatron_lm.py`). Release 0.17.1, whose package has it, writes others here, where `make test` has installed it
(`requirements/megatron-lm.txt`). Of the kept ones, format torch: after three steps of a model with three layers of 48, six
heads in two groups, SwiGLU of 72, 119 words padded to 120. Format torch_dist: tp1, and tp2, which loaded it on two ranks and
saved it again; dp2 with the distributed optimizer in its default layout (dp_reshardable), and full2, the same training in the
layout that carries parameter names. Their sizes are no multiples of 64.
"""

import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.ckpt_compare.verdicts import compared, judged, kinds
from tests.distributed.launch import launch
from trainprobe.ckpt_compare.check import check
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.engine.storage.dumps.findings_file import read_findings

SAVED = Path(__file__).parent / "data" / "megatron_lm"
FILE = SAVED / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
DISTRIBUTED = SAVED.parent / "megatron_lm_dist.tar.xz"

INSTALLED = os.environ.get("TRAINPROBE_MEGATRON_LM") or None
if INSTALLED is None and os.environ.get("CI") == "true":
    raise RuntimeError("CI writes checkpoints with Megatron-LM: TRAINPROBE_MEGATRON_LM must name the folder that it is in")
needs_megatron_lm = pytest.mark.skipif(
    INSTALLED is None,
    reason="TRAINPROBE_MEGATRON_LM does not name a folder with megatron-core 0.17 (make .venvs/megatron-lm/.ready)",
)
WORDS = shlex.split("""
    --num-layers 2 --hidden-size 20 --ffn-hidden-size 36 --num-attention-heads 2 --group-query-attention --num-query-groups 2
    --seq-length 16 --max-position-embeddings 16 --vocab-size 61 --make-vocab-size-divisible-by 2
    --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-style cosine --lr-decay-iters 10
    --mock-data --num-workers 0 --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion --swiglu
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --use-cpu-initialization --distributed-backend gloo --attention-dropout 0 --hidden-dropout 0 --eval-iters 0
    --eval-interval 100 --log-interval 1 --exit-signal-handler --save-interval 100
""")
LAYOUTS = {  # ranks, further words, the checkpoint that it goes on from
    "torch": (1, "--ckpt-format torch", None),
    "tp1": (1, "--ckpt-format torch_dist", None),
    "tp2": (2, "--ckpt-format torch_dist --tensor-model-parallel-size 2", "tp1"),
    "dp2": (2, "--ckpt-format torch_dist --bf16 --use-distributed-optimizer --ddp-bucket-size 3000", None),
}


@pytest.fixture(scope="module")
def written_now(tmp_path_factory) -> Path:
    """Return the folder with `LAYOUTS`, written by Megatron-LM in this run of the tests."""
    folder = tmp_path_factory.mktemp("written_now")
    script = Path(__file__).parent / "writers" / "write_megatron_lm.py"
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(INSTALLED)])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        for name, (ranks, words, start) in LAYOUTS.items():
            load = ["--load", str(folder / start)] if start else []
            launch(script, ranks, *WORDS, *words.split(), *load, "--save", str(folder / name), timeout=600)
    return folder


@needs_megatron_lm
@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(1800)
def test_what_megatron_lm_writes_now_is_read_whole(written_now):
    """One process in both formats, and two ranks in tensor parallel and with the default distributed optimizer."""
    for name, (ranks, _, _) in LAYOUTS.items():
        found = open_checkpoint(written_now / name)
        assert (found.problems, found.warnings) == ((), ()), name
        args = found.state["args"]
        assert (len(args) > 600, args["exit_signal"], args["world_size"]) == (True, "Signals(15)", ranks), name
        assert (args["ffn_hidden_size"], args["save"]) == (36, str(written_now / name))
    assert recognise(written_now / "torch") == "megatron_legacy"
    for other in ("tp1", "tp2"):  # the same training: nothing in it is random
        found = compared(written_now / "torch", written_now / other, ("weights", "optimizer", "iteration"))
        assert verdict_of(found).code == 0, other
        assert kinds(found) == {"weights": 21, "optimizer": 42}
    checked = check(compared(written_now / "dp2", written_now / "dp2").a)
    assert (checked.code, checked.masters) == (0, 21)
    common = (written_now / "dp2" / "iter_0000003" / "common.pt").read_bytes()
    assert b"dp_reshardable" in common


@needs_megatron_lm
@pytest.mark.slow
@pytest.mark.frameworks
def test_a_changed_number_of_what_megatron_lm_writes_now_is_named(written_now, tmp_path):
    for other, key in (("tp2", "layers.1.attention.k.weight"), ("dp2", "layers.0.mlp.fc2.weight#exp_avg_sq")):
        spoil(written_now / other, tmp_path / other, key)
        found = judged(written_now / ("tp1" if other == "tp2" else other), tmp_path / other)
        assert found.code == 2
        assert f"differ: 1 of {63 if other == 'tp2' else 84} tensors; worst is {key}: " in found.sentence


@needs_megatron_lm
@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("save", ["flag", "refuse"])
def test_a_save_of_megatron_lm_beside_an_error_is_flagged_or_refused(tmp_path, save):
    plan = {"output": str(tmp_path / "run"), "monitor": True, "console": False, "save_gate": {"save": save}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).parent / "writers" / "save_megatron_lm_gated.py"
    words = [*WORDS, "--ckpt-format", "torch", "--save-interval", "1", "--no-check-for-nan-in-loss-and-grad"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(INSTALLED)])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        printed = launch(script, 1, str(tmp_path / "plan.json"), *words, "--save", str(tmp_path / "out"), timeout=600)[0]
    saved = sorted(folder.name for folder in (tmp_path / "out").glob("iter_*"))
    said = "save_checkpoint while an error stands: nonfinite (step 2)"
    if save == "refuse":
        assert said.replace("while", "was refused while") in printed
        assert saved == ["iter_0000001"]
    else:
        assert saved == ["iter_0000001", "iter_0000002", "iter_0000003"]
        assert [f.message for f in read_findings(tmp_path / "run") if f.rule == "save_gate"] == [said]


def spoil(path: Path, copy: Path, key: str) -> None:
    """Copy a checkpoint and change one bit of one number of a tensor."""
    shutil.copytree(path, copy)
    piece = compared(path, path).b.tensors[key].pieces[-1]
    numbers = piece.source.load().tobytes()
    changed = copy / "iter_0000003" / piece.file.partition(":")[0]
    raw = bytearray(changed.read_bytes())
    assert raw.count(numbers) == 1
    raw[raw.index(numbers) + 6] ^= 0x40
    changed.write_bytes(raw)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory) -> Path:
    """Return the folder with tp1, tp2, dp2 and full2."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    with tarfile.open(DISTRIBUTED) as archive:
        archive.extractall(folder, filter="data")
    return folder


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


def test_two_tensor_ranks_hold_what_one_holds(distributed):
    """Weights and moments, the vocabulary padded to 62 rows on one side and to 64 on the other."""
    found = compared(distributed / "tp1", distributed / "tp2", ("weights", "optimizer", "iteration"))
    assert verdict_of(found).code == 0
    assert (found.a.layout.get("tp"), found.b.layout["tp"]) == (1, 2)
    assert kinds(found) == {"weights": 3 + 2 * 9, "optimizer": 2 * (3 + 2 * 9)}


def test_the_default_distributed_optimizer_is_mapped(distributed):
    """Buckets without names against the same training saved under names: master, exp_avg and exp_avg_sq of each tensor."""
    common = (distributed / name / "iter_0000003" / "common.pt" for name in ("dp2", "full2"))
    assert [next(k for k in (b"dp_reshardable", b"fully_reshardable") if k in p.read_bytes()) for p in common] == [
        b"dp_reshardable",
        b"fully_reshardable",
    ]
    found = compared(distributed / "dp2", distributed / "full2", ("weights", "optimizer", "iteration"))
    assert verdict_of(found).code == 0
    assert kinds(found) == {"weights": 21, "optimizer": 63}
    checked = check(found.a)
    assert (checked.code, checked.masters) == (0, 21)


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("tp1", "tp2", "layers.1.attention.k.weight"),
        ("tp1", "tp2", "layers.0.mlp.fc2.weight#exp_avg_sq"),
        ("full2", "dp2", "layers.1.attention.v.weight#exp_avg"),
        ("full2", "dp2", "embedding.word.weight#master"),
    ],
)
def test_one_changed_number_is_found_and_named(distributed, tmp_path, one, other, key):
    spoil(distributed / other, tmp_path / other, key)
    found = judged(distributed / one, tmp_path / other)
    assert found.code == 2
    assert f"differ: 1 of {63 if one == 'tp1' else 84} tensors; worst is {key}: " in found.sentence
