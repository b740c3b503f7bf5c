"""A master weight, rounded to the format of its weight, is the weight: the rounding against torch, and what follows from it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.ckpt_compare.memory import tensor
from trainprobe.ckpt_compare.masters import agreement, rounded
from trainprobe.ckpt_compare.megatron_dp_reshardable import bucket_states
from trainprobe.ckpt_compare.megatron_order import model_orders
from trainprobe.engine.compare.number_formats import number_format

RNG = np.random.default_rng(3)


def every_kind_of_value():
    """Ordinary, halfway, subnormal and huge values, infinities and signed zeros."""
    halves = (np.arange(4096, dtype=np.uint32) << 15 | 0x3F000000).view(np.float32)
    raw = RNG.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    more = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 1e-45, 3.4e38, 6e-8], np.float32)
    return np.concatenate([halves, raw[~np.isnan(raw)], more])


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32"])
def test_rounding_is_that_of_torch(to):
    values = every_kind_of_value()
    oracle = torch.from_numpy(values.copy()).to(getattr(torch, to)).view(torch.int32 if to == "float32" else torch.int16)
    found = rounded(values, number_format("float32"), number_format(to))
    assert np.array_equal(found.view(np.int32 if to == "float32" else np.int16), oracle.numpy())


def pair(name, values):
    bits = rounded(values, number_format("float32"), number_format("bfloat16"))
    return tensor(name, bits, dtype="bfloat16"), tensor(name, values, slot="master")


def test_another_s_master_does_not_hold_and_one_changed_element_does():
    weight, master = pair("w", RNG.standard_normal((40, 30), np.float32))
    assert agreement(weight, master).holds
    other = tensor("w", RNG.standard_normal((40, 30), np.float32), slot="master")
    assert not agreement(weight, other).holds
    weight.pieces[0].source.bits[0, 0] ^= 1
    seen = agreement(weight, master, most=None)
    assert (seen.count - seen.equal, seen.holds) == (1, True)


def bucket(*values):
    """One bucket of one rank: these parameters one after the other, in all three slots."""
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    flat = np.concatenate([v.reshape(-1) for v in values])
    return {f"{key}.{slot}": tensor(slot, flat * factor) for slot, factor in (("param", 1), ("exp_avg", 2), ("exp_avg_sq", 3))}


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_sizes_are_placed_where_their_masters_are_and_otherwise_not_at_all(swapped):
    values = {
        f"decoder.layers.{i}.mlp.linear_fc{n}.weight": RNG.standard_normal((64, 64), np.float32) for i in (0, 1) for n in (1, 2)
    }
    stored = [pair(name, v)[0] for name, v in values.items()]
    order = list(reversed(values.values()))
    if swapped:  # as no module order would have it
        order[0], order[1] = order[1], order[0]
    problems = []
    found = list(bucket_states(bucket(*order), list(reversed(stored)), {}, {}, problems))
    names = {t.name for t in found}
    assert all(np.array_equal(t.pieces[0].source.load(), 2 * values[t.name]) for t in found if t.slot == "exp_avg")
    if not swapped:
        assert (names, problems) == (set(values), [])
    else:
        assert len(names) == 2
        assert "the states of 2 parameters are not placed" in problems[0].message
        assert re.search(r"are the weights in \d\d? of 4096 elements", problems[0].message)


def test_the_order_of_modules_does_not_depend_on_that_of_the_file():
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    layer = [
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
    ]
    layer += ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight"]
    whole = [names[0], *(f"decoder.layers.{i}.{part}" for i in range(12) for part in layer), *names[1:]]
    for seed in range(5):
        shuffled = [
            str(n) for n in np.random.default_rng(seed).permutation([*whole, "decoder.layers.0.mlp.router.expert_bias"])
        ]
        assert whole in list(model_orders(shuffled))
