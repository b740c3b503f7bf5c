"""Tensors in another order as a whole, copies of a neighbour, files of another save, vocabularies, last bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.ckpt_bench.judged import judged
from benchmarks.ckpt_bench.rearranged import rearranged_pairs
from trainprobe.ckpt_compare.rearranged import described, permutation
from trainprobe.cli import main

TWELVE = np.arange(12)
ORDERS = {
    "the same rows in reverse order": TWELVE[::-1],
    "the same with their halves of rows exchanged": np.roll(TWELVE, 6),
    "the same with their thirds of rows in the order 3, 1, 2": np.roll(TWELVE, 4),
    "the same, interleaved in B: one of the rows of each of 2 parts in turn": TWELVE.reshape(2, 6).T.reshape(-1),
    "the same, interleaved in A: one of the rows of each of 2 parts in turn": TWELVE.reshape(6, 2).T.reshape(-1),
    "the same, interleaved in B: 2 rows of each of 3 parts in turn": np.arange(18)
    .reshape(3, 3, 2)
    .transpose(1, 0, 2)
    .reshape(-1),
    "the same in another order of rows": np.random.default_rng(1).permutation(12),
}


@pytest.mark.parametrize("said", ORDERS)
def test_an_order_is_said_only_where_it_is_that_one(said):
    x = np.random.default_rng(0).standard_normal((len(ORDERS[said]), 3))
    found = permutation(x, x[ORDERS[said]], 0)
    assert np.array_equal(x[found], x[ORDERS[said]])
    assert described(found, "rows") == said


def test_other_rows_are_no_order():
    x = np.random.default_rng(0).standard_normal((12, 3))
    y = x[::-1].copy()
    y[0, 0] += 1
    assert permutation(x, y, 0) is None
    assert permutation(x, x, 0) is None


def test_each_planted_cause_is_named_and_no_healthy_pair_is_accused(tmp_path):
    """Cases c10, p02, p03, p04 and p09 are among them."""
    answers = list(rearranged_pairs(tmp_path))
    assert len(answers) > 34
    assert [(a.model, a.layout, a.cause, a.sentence) for a in answers if not a.good] == []


def shards(path, states):
    path.mkdir()
    index = {}
    for number, state in enumerate(states):
        save_file(state, path / f"model-{number}.safetensors")
        index |= dict.fromkeys(state, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_a_shard_of_another_save_is_named_with_the_time_of_its_file(tmp_path):
    g = torch.Generator().manual_seed(0)
    names = [[f"blocks.{2 * i + j}.{n}.weight" for j in range(2) for n in ("up", "down")] for i in range(4)]
    states = [{name: torch.randn(8, 8, generator=g) for name in some} for some in names]
    a = shards(tmp_path / "a", states)
    states[2] = {k: v + 0.01 * torch.randn(8, 8, generator=g) for k, v in states[2].items()}
    states[1]["blocks.3.up.weight"] = states[1]["blocks.3.up.weight"].clone()
    b = shards(tmp_path / "b", states)
    os.utime(b / "model-2.safetensors", (1_000_000, 1_000_000))
    for name in ("model-0", "model-1", "model-3"):
        os.utime(b / f"{name}.safetensors", (1_005_000, 1_005_000))
    found = judged(a, b)
    said = "only what model-2.safetensors holds differs (4 tensors), and in B it was written 5,000 s before the others"
    assert said in found.sentence or said in " ".join(found.details)


def test_ranks_of_several_iterations_are_told_of_one_checkpoint_alone(tmp_path, capsys):
    for rank, iteration in enumerate((500, 500, 400)):
        (tmp_path / f"mp_rank_0{rank}").mkdir()
        held = {"args": {"tensor_model_parallel_size": 3, "hidden_size": 4, "num_attention_heads": 3}, "iteration": iteration,
                "model": {"decoder.final_layernorm.weight": torch.ones(4)}}  # fmt: skip
        torch.save(held, tmp_path / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    assert main(["ckpt-show", "--check", str(tmp_path)]) == 3
    assert "mp_rank_02: is of iteration 400, and the other ranks are of 500" in capsys.readouterr().out


def test_the_last_bit_is_said_as_that(tmp_path):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    y = x.clone().view(torch.int32)
    y[3] ^= 1
    for name, value in (("a", x), ("b", y.view(torch.float32))):
        save_file({"w": value}, tmp_path / f"{name}.safetensors")
    said = "equal within rounding: 1 of 1 tensors differ in the last bit of float32 (1 of their 64 elements, by one unit)"
    assert judged(tmp_path / "a.safetensors", tmp_path / "b.safetensors").sentence.startswith(said)


@pytest.fixture
def fused(tmp_path):
    paths = []
    for seed in (0, 1):
        g = torch.Generator().manual_seed(seed)
        state = {
            f"model.layers.0.self_attn.{n}.weight": torch.randn(r, 8, generator=g) for n, r in (("qkv_proj", 16), ("o_proj", 8))
        }
        path = tmp_path / f"{seed}"
        path.mkdir()
        save_file(state, path / "model.safetensors")
        config = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        (path / "config.json").write_text(json.dumps(config))
        paths.append(state)
    return tmp_path, paths


def test_json_has_the_names_in_the_files_beside_the_logical_ones(fused):
    path, (a, b) = fused
    main(["ckpt-compare", "-q", str(path / "0"), str(path / "1"), "--json", str(path / "out.json")])
    held = json.loads((path / "out.json").read_text())
    for name in a:
        found, d = held[name], (a[name].double() - b[name].double()).norm()
        assert found["numel"] == a[name].numel()
        assert found["l2"] == pytest.approx(float(d), rel=1e-9)
        cosine = torch.nn.functional.cosine_similarity(a[name].double().flatten(), b[name].double().flatten(), 0)
        assert found["cos"] == pytest.approx(float(cosine), rel=1e-9)
    assert held["model.layers.0.self_attn.o_proj.weight"]["shape"] == [8, 8]
    assert "layers.0.attention.q.weight" in held


def test_an_earlier_result_is_kept(fused, capsys):
    path = fused[0]
    for _ in range(3):
        main(["ckpt-compare", "-q", str(path / "0"), str(path / "1"), "--json", str(path / "out.json")])
    assert sorted(p.name for p in path.glob("out.json*")) == ["out.json", "out.json.1", "out.json.2"]
    assert "held an earlier result: it is kept as out.json.1" in capsys.readouterr().err.replace("\n", "")


PEAK = """
import resource, sys
from trainprobe.cli import main
code = main(["ckpt-compare", "-q", *sys.argv[1:]])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_that_differs_takes_no_more_memory_than_none(tmp_path, dtype):
    """Of one format on both sides, and of two."""
    value = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(0))
    peaks = []
    save_file({"a.weight": value}, tmp_path / "a.safetensors")
    for name, more in (("same", 0.0), ("one", 1.0)):
        value[17, 5] += more
        save_file({"a.weight": value.to(dtype)}, tmp_path / f"{name}.safetensors")
        command = [sys.executable, "-c", PEAK, str(tmp_path / "a.safetensors"), str(tmp_path / f"{name}.safetensors")]
        *_, code, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        peaks.append((int(code), int(peak)))
    (equal, least), (differ, most) = peaks
    assert (equal < 2, differ) == (True, 2)
    assert most < least + 32  # MiB: the tensor in float64 takes 64
