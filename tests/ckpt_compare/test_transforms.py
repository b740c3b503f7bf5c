from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.ckpt_compare.memory import dense, tensor
from trainprobe.ckpt_compare.transforms import TRANSFORMS, split, turn
from trainprobe.cli import main
from trainprobe.engine.geometry.fused_rows import Band
from trainprobe.engine.model_names import TRANSFORM_NAMES
from trainprobe.errors import CompareError

RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def rows_of(array, *cuts):
    """Boxes of whole rows between the cuts."""
    edges = [0, *cuts, array.shape[0]]
    return [((lo, *(0,) * (array.ndim - 1)), (hi - lo, *array.shape[1:])) for lo, hi in pairwise(edges)]


def apply(name, array, cuts=(), **config):
    return [dense(t) for t in TRANSFORMS[name](tensor("w", array, rows_of(array, *cuts)), config)]


@pytest.mark.parametrize("cuts", [(), (5,), (3, 17, 40)])
def test_attention_fused_by_group_is_taken_apart_as_the_definition_says(cuts):
    heads, groups, dim, hidden = 8, 4, 3, 5
    fused = numbers(groups * (heads // groups + 2) * dim, hidden)
    grouped = fused.reshape(groups, heads // groups + 2, dim, hidden)
    expected = [grouped[:, :-2].reshape(-1, hidden), grouped[:, -2].reshape(-1, hidden), grouped[:, -1].reshape(-1, hidden)]
    found = apply("qkv_by_group", fused, cuts, heads=heads, groups=groups, head_dim=dim)
    assert all(np.array_equal(f, e) for f, e in zip(found, expected, strict=True))


def test_attention_fused_in_blocks_is_taken_apart_as_the_definition_says():
    fused = numbers(8 * 3 + 2 * 2 * 3, 5)
    found = apply("qkv_blocks", fused, (10,), heads=8, groups=2, head_dim=3)
    assert all(np.array_equal(f, e) for f, e in zip(found, (fused[:24], fused[24:30], fused[30:]), strict=True))


def test_halves_and_thirds_are_those_of_the_rows():
    x = numbers(12, 4)
    assert all(np.array_equal(f, e) for f, e in zip(apply("halves", x, (5,)), (x[:6], x[6:]), strict=True))
    assert all(np.array_equal(f, e) for f, e in zip(apply("thirds", x, (5,)), (x[:4], x[4:8], x[8:]), strict=True))


def test_a_bias_is_split_like_its_weight():
    x = numbers(8)
    assert all(np.array_equal(f, e) for f, e in zip(apply("halves", x, (3,)), (x[:4], x[4:]), strict=True))


def test_stacked_experts_become_one_tensor_each():
    x = numbers(3, 4, 5)
    assert all(np.array_equal(f, e) for f, e in zip(apply("by_index", x, (2,)), x, strict=True))


def test_a_turned_tensor_is_its_transpose():
    x = numbers(4, 6)
    assert np.array_equal(dense(turn(tensor("w", x, rows_of(x, 1)))), x.T)


def test_a_number_of_heads_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(CompareError, match="40 rows on axis 0 where 48 are expected"):
        apply("qkv_by_group", numbers(40, 2), heads=8, groups=4, head_dim=3)


def test_bands_may_reorder_rows():
    x = numbers(4, 2)
    (found,) = split(tensor("w", x), 0, [Band(0, 2, 0, 2), Band(2, 2, 0, 0)], 1)
    assert np.array_equal(dense(found), np.concatenate([x[2:], x[:2]]))


def test_each_transform_that_a_map_may_name_is_carried_out():
    assert sorted(TRANSFORMS) == sorted(TRANSFORM_NAMES)


@pytest.mark.parametrize("kv", [32, 16])
@pytest.mark.parametrize("order", ["qkv", "qvk"])
@pytest.mark.parametrize("fused_first", [False, True])
def test_rows_of_fused_attention_are_known_from_the_side_that_has_its_parts(kv, order, fused_first, tmp_path, capsys):
    """No config says how many heads there are: as many rows are q as the other side has."""
    apart, fused = {}, {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        parts = {part: numbers(32 if part == "q" else kv, 32) for part in "qkv"}
        apart |= {f"{prefix}{part}_proj.weight": array for part, array in parts.items()}
        fused[f"{prefix}qkv_proj.weight"] = np.concatenate([parts[part] for part in order])
        apart[f"{prefix}o_proj.weight"] = fused[f"{prefix}o_proj.weight"] = numbers(32, 32)
    paths = [tmp_path / "apart.safetensors", tmp_path / "fused.safetensors"]
    for path, arrays in zip(paths, (apart, fused), strict=True):
        save_file(arrays, path)
    code = main(["ckpt-compare", *map(str, paths[::-1] if fused_first else paths)])
    first = capsys.readouterr().out.splitlines()[0]
    assert code == (0 if order == "qkv" else 2), first
    assert first.startswith("identical: 8 " if order == "qkv" else "differ: k and v are exchanged in 2 layers")
