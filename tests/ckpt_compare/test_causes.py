"""The cause stands in the first line: each planted in a model, alone, and the same model without it is identical."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ckpt_compare.memory import checkpoint, tensor
from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.verdict import verdict_of

HEADS, GROUPS, DIM, HIDDEN = 4, 2, 6, 24


def model(seed=0):
    """Two layers with attention, an MLP of three experts, a router and norms, float32."""
    g = np.random.default_rng(seed)
    found = {"embedding.word.weight": g.standard_normal((31, HIDDEN)), "final_norm.weight": 1 + 0.1 * g.standard_normal(HIDDEN)}
    for i in range(3):
        sizes = {"q": HEADS * DIM, "k": GROUPS * DIM, "v": GROUPS * DIM, "proj": HIDDEN}
        found |= {f"layers.{i}.attention.{p}.weight": g.standard_normal((n, HIDDEN)) for p, n in sizes.items()}
        found |= {f"layers.{i}.mlp.norm.weight": 1 + 0.1 * g.standard_normal(HIDDEN)}
        found |= {f"layers.{i}.mlp.router.weight": g.standard_normal((5, HIDDEN))}
        for e in range(3):
            found |= {f"layers.{i}.mlp.experts.{e}.{p}.weight": g.standard_normal((10, HIDDEN)) for p in ("gate", "up")}
    return {k: v.astype(np.float32) for k, v in found.items()}


def swap(held, one, other):
    held[one], held[other] = held[other], held[one]


def exchanged_layers(b):
    for key in [k for k in b if k.startswith("layers.0.")]:
        swap(b, key, key.replace("layers.0.", "layers.1."))


def exchanged_gates(b):
    for key in [k for k in b if ".gate." in k]:
        swap(b, key, key.replace(".gate.", ".up."))


def other_rotary_order(b):
    for key in [k for k in b if k.endswith((".q.weight", ".k.weight"))]:
        b[key] = b[key].reshape(-1, 2, DIM // 2, HIDDEN).transpose(0, 2, 1, 3).reshape(-1, HIDDEN)


def not_interleaved(b):
    """Megatron's fused rows, by group, taken for all q, all k, all v."""
    for i in range(3):
        q, k, v = (b[f"layers.{i}.attention.{p}.weight"] for p in "qkv")
        share = HEADS // GROUPS * DIM
        rows = [r for g in range(GROUPS) for r in (q[g * share :][:share], k[g * DIM :][:DIM], v[g * DIM :][:DIM])]
        fused = np.concatenate(rows)
        for p, part in zip("qkv", np.split(fused, [len(q), len(q) + len(k)]), strict=True):
            b[f"layers.{i}.attention.{p}.weight"] = part


def permuted_router(b):
    for i in range(3):
        b[f"layers.{i}.mlp.router.weight"] = b[f"layers.{i}.mlp.router.weight"][[3, 1, 0, 4, 2]]


def zero_centred(b):
    for key in [k for k in b if "norm" in k]:
        b[key] = b[key] - 1


def scaled(b):
    for key in [k for k in b if ".proj." in k]:
        b[key] = b[key] * np.float32(0.125)


def transposed(b):
    for key in [k for k in b if ".proj." in k]:
        b[key] = b[key].T


def rotated_layers(b):
    for key in [k for k in b if k.startswith("layers.0.")]:
        one, two, three = (key.replace("layers.0.", f"layers.{i}.") for i in range(3))
        b[one], b[two], b[three] = b[two], b[three], b[one]


def exchanged_keys_and_values(b):
    for key in [k for k in b if ".k." in k]:
        swap(b, key, key.replace(".k.", ".v."))


def exchanged_experts(b):
    for part in ("gate", "up"):
        swap(b, f"layers.1.mlp.experts.0.{part}.weight", f"layers.1.mlp.experts.2.{part}.weight")


def rotated_experts(b):
    for part in ("gate", "up"):
        one, two, three = (f"layers.1.mlp.experts.{e}.{part}.weight" for e in range(3))
        b[one], b[two], b[three] = b[two], b[three], b[one]


def merged_adapter(b):
    g = np.random.default_rng(5)
    for key in [k for k in b if ".proj." in k]:
        b[key] = (b[key] + g.standard_normal((HIDDEN, 3)) @ g.standard_normal((3, HIDDEN))).astype(np.float32)


def rounded(b):
    for key in [k for k in b if ".mlp." in k]:
        b[key] = b[key].astype(np.float16).astype(np.float32)


def zeroed(b):
    for key in [k for k in b if ".v." in k]:
        b[key] = np.zeros_like(b[key])


def layer_made_anew(b):
    g = np.random.default_rng(5)
    for key in [k for k in b if k.startswith("layers.2.")]:
        b[key] = g.standard_normal(b[key].shape).astype(np.float32)


PLANTED = {
    merged_adapter: "differ: 3 matrices, such as layers.0.attention.proj.weight, differ by a matrix of rank 3, as a merged ",
    rounded: "24 tensors, such as layers.0.mlp.experts.0.gate.weight, are rounded to float16 in B (stored as float32). ",
    zeroed: "differ: 3 weight tensors are all zeros in B, such as layers.0.attention.v.weight. ",
    layer_made_anew: "differ: only layer 2 differs (12 of its 12 tensors). ",
    rotated_layers: "differ: layers 0, 1 and 2 of B hold layers 1, 2 and 0 of A. ",
    exchanged_keys_and_values: "differ: k and v are exchanged in 3 layers. ",
    exchanged_experts: "differ: experts 0 and 2 of layer 1 are exchanged. ",
    rotated_experts: "differ: layers.1.mlp.experts are in another order. ",
    exchanged_layers: "layers 0 and 1 are exchanged. ",
    exchanged_gates: "gate and up are exchanged in 9 experts. ",
    other_rotary_order: "in the other rotary order: halves in A, interleaved pairs in B (heads of 6). ",
    not_interleaved: "q, k and v hold each other's rows: one side is interleaved by query group and the other is not (",
    permuted_router: "the same in another order of rows of the router. ",
    zero_centred: "4 tensors, such as final_norm.weight, are zero-centred in B: one less than in the other. ",
    scaled: "0.125 times as large in B as in A. ",
    transposed: "transposed in B. ",
}


def judged(a, b):
    sides = (checkpoint(*(tensor(k, v) for k, v in held.items())) for held in (a, b))
    return verdict_of(compare(*sides))


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_the_first_line_names_the_cause(plant):
    a, b = model(), model()
    assert judged(a, b).code == 0
    plant(b)
    found = judged(a, b)
    assert found.code == 2
    assert PLANTED[plant] in found.sentence


def test_one_exchanged_parameter_is_not_said_to_be_its_layers():
    a, b = model(), model()
    swap(b, "layers.0.attention.q.weight", "layers.1.attention.q.weight")
    assert judged(a, b).sentence.startswith("differ: attention.q.weight of layers 0 and 1 is exchanged. 2 of ")


def test_masters_that_are_rounded_weights_are_named():
    a, b = model(), model()
    short = {k: (v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for k, v in b.items()}
    sides = [
        checkpoint(*(tensor(k, v) for k, v in a.items()), *(tensor(k, v, slot="master") for k, v in masters.items()))
        for masters in (a, short)
    ]
    found = verdict_of(compare(*sides))
    said = f"differ: the masters of B are bfloat16 numbers in {len(a)} tensors: its weights were loaded without its optimizer"
    assert found.sentence.startswith(said)


def test_moments_that_hold_each_other_s_values_are_named():
    a, b = model(), model(1)
    sides = [
        checkpoint(*(tensor(k, v) for k, v in a.items()), *(tensor(k, s[k], slot=n) for n, s in moments.items() for k in a))
        for moments in ({"exp_avg": a, "exp_avg_sq": b}, {"exp_avg": b, "exp_avg_sq": a})
    ]
    said = f"differ: exp_avg and exp_avg_sq are exchanged in {len(a)} parameters. "
    assert verdict_of(compare(*sides)).sentence.startswith(said)


def test_an_update_of_low_rank_is_not_seen_in_a_few_elements_or_in_any_update():
    a, few, any_rank = model(), model(), model()
    g = np.random.default_rng(5)
    for i in range(3):
        few[f"layers.{i}.attention.proj.weight"][3] += 1  # a row: of rank 1
        matrix = any_rank[f"layers.{i}.attention.proj.weight"]
        matrix += g.standard_normal(matrix.shape).astype(np.float32)
    for b in (few, any_rank):
        assert judged(a, b).sentence.startswith("differ: 3 of ")


def test_elements_beyond_the_rounding_of_a_coarser_format_are_counted():
    a, b = model(), {k: v.astype(np.float16) for k, v in model().items()}
    assert judged(a, b).code == 1
    b["layers.1.attention.q.weight"][2, 3] += 1
    assert "1 of 576 elements beyond rounding, largest at [2, 3]" in judged(a, b).sentence


def test_a_cause_is_not_named_for_other_values():
    """Another model, and one changed element: nothing is explained, and the first line says what it always said."""
    a, b = model(), model(1)
    assert judged(a, b).sentence.startswith(f"differ: {len(a)} of {len(a)} tensors; worst is")
    b = model()
    other_rotary_order(b)
    for key in [k for k in b if k.endswith((".q.weight", ".k.weight"))]:
        b[key][0, 0] += 1
    assert judged(a, b).sentence.startswith("differ: 6 of")


def test_norms_that_are_zero_centred_on_both_sides_are_told_apart_by_their_values():
    """The squares of the side that is one less are the larger ones."""
    a = {k: v - 1 if "norm" in k else v for k, v in model().items()}
    b = {k: v - 1 if "norm" in k else v for k, v in a.items()}
    assert "4 tensors, such as final_norm.weight, are zero-centred in B: one less than in the other. " in judged(a, b).sentence


def test_a_matrix_of_another_shape_that_is_the_transpose_is_named():
    a, b = model(), model()
    for key in [k for k in b if ".up." in k]:
        b[key] = np.ascontiguousarray(b[key].T)
    found = judged(a, b)
    assert found.code == 3
    assert found.sentence.startswith("incomplete: 9 tensors, such as layers.0.mlp.experts.0.up.weight, are transposed in B, 9 ")


def test_layers_of_a_model_that_no_map_knows_are_named():
    a = {k.replace("layers.", "encoder.layer."): v for k, v in model().items()}
    b = dict(a)
    for key in [k for k in b if ".layer.0." in k]:
        swap(b, key, key.replace(".layer.0.", ".layer.2."))
    assert judged(a, b).sentence.startswith("differ: layers 0 and 2 are exchanged. ")
