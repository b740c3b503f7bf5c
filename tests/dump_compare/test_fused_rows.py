"""Projections that are one in one family of models and several in another are compared element by element."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.dump_compare.grouped_model import DIM, GROUPS, grouped
from tests.dump_compare.renamed_models import hugging_face, llama, own, train
from trainprobe.cli import main
from trainprobe.dump_compare.renamed.fused_rows import find_rows

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TENSORS = {"level": "L0", "task": "tensor"}


def compared(a, b, tmp_path, capsys):
    capsys.readouterr()
    code = main(["dump-compare", str(a), str(b), "--json", str(tmp_path / "all.json")])
    return code, capsys.readouterr().out, json.loads((tmp_path / "all.json").read_bytes())["calls"]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Return the folder with dumps of both models: their tensors, and their statistics."""
    folder = tmp_path_factory.mktemp("fused")
    for name, model in (("llama", llama), ("grouped", grouped)):
        train(folder / f"{name}-tensor", model(), steps=2, **TENSORS)
        train(folder / f"{name}-statistics", model(), steps=2, level="L0", task="statistics")
    return folder


@pytest.mark.parametrize("swapped", [False, True])
def test_rows_of_groups_are_compared_with_those_of_three_projections(dumps, tmp_path, capsys, swapped):
    sides = ["grouped-tensor", "llama-tensor"][:: -1 if swapped else 1]
    code, said, calls = compared(*(dumps / side for side in sides), tmp_path, capsys)
    assert code == 1, said
    assert "how the rows of several modules lie in the one that they are is known" in said, said
    assert "4 times several modules of one side are one of the other (4 by names of both families)" in said, said
    fused = [call for call in calls if "+k_proj+" in f"{call['a']} {call['b']}" or "+up_proj" in f"{call['a']} {call['b']}"]
    assert {call["paired_by"] for call in fused} == {"names of both families"}
    assert {value["evidence"] for call in fused for value in call["values"]} == {"values"}
    assert {value["slot"] for call in fused for value in call["values"]} == {
        *("input.0", "output", "grad_output.0", "grad_input.0", "parameters.weight", "weight")
    }


def test_without_stored_elements_statistics_tell(dumps, tmp_path, capsys):
    code, said, calls = compared(dumps / "grouped-statistics", dumps / "llama-statistics", tmp_path, capsys)
    assert code == 1, said
    assert "is known in 2 of 4 of them; the others are compared by statistics" in said, said  # gate and up: the map says it
    assert {value["evidence"] for call in calls for value in call["values"] if "+" in call["b"]} <= {"statistics", "bits"}


def weight(name, row, column, by):
    def change(model):
        model.get_submodule(name).weight[row, column] += by

    return change


def result(model):
    def wrong(module, given, made):
        made = made.clone()
        made[1, 4, 5] += 0.3
        return made

    model.model.layers[0].self_attn.v_proj.register_forward_hook(wrong)


def gradient(model):
    def wrong(grad):
        grad = grad.clone()
        grad[9, 30] += 0.05
        return grad

    model.model.layers[1].self_attn.k_proj.weight.register_hook(wrong)


def swap(model):
    layer = model.model.layers[1].self_attn
    layer.k_proj.weight[:], layer.v_proj.weight[:] = layer.v_proj.weight.clone(), layer.k_proj.weight.clone()


PLANTED = {
    "query": (
        weight("model.layers.1.self_attn.q_proj", 21, 3, 1e-3),
        "layers.1.self_attention.linear_qkv",
        "[21, 3] of q_proj",
    ),
    "key": (
        weight("model.layers.0.self_attn.k_proj", 15, 31, 1e-3),
        "layers.0.self_attention.linear_qkv",
        "[15, 31] of k_proj",
    ),
    "value": (weight("model.layers.0.self_attn.v_proj", 0, 7, 1e-3), "layers.0.self_attention.linear_qkv", "[0, 7] of v_proj"),
    "up": (weight("model.layers.1.mlp.up_proj", 63, 0, 1e-3), "layers.1.mlp.linear_fc1", "[63, 0] of up_proj"),
    "result": (result, "layers.0.self_attention.linear_qkv", "[1, 4, 5] of v_proj"),
    "gradient": (gradient, "layers.1.self_attention.linear_qkv.Linear.parameters_grad", "[9, 30] of k_proj"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_one_wrong_element_of_one_of_three_is_named(dumps, tmp_path, capsys, planted):
    change, place, element = PLANTED[planted]
    code, said, _ = compared(dumps / "grouped-tensor", train(tmp_path / "b", llama(), change, **TENSORS), tmp_path, capsys)
    first = said.splitlines()[0]
    assert code == 2, said
    assert place in first, first
    assert f"most at {element}" in first, first


def test_keys_and_values_that_are_swapped_differ(dumps, tmp_path, capsys):
    """All statistics of the three together are those of the right model."""
    code, said, _ = compared(dumps / "grouped-tensor", train(tmp_path / "b", llama(), swap, **TENSORS), tmp_path, capsys)
    assert code == 2, said
    assert "decoder.layers.1.self_attention.linear_qkv" in said.splitlines()[0], said
    assert "the weights differ" in said.splitlines()[0], said


@pytest.mark.parametrize("order", ["qkv", "kvq"])
def test_weights_tell_the_rows_where_no_map_knows_the_names(tmp_path, capsys, order):
    """GPT-2 keeps its one matrix transposed; the other side calls its projections in whatever order."""
    a, b = train(tmp_path / "a", hugging_face(), steps=2, **TENSORS), train(tmp_path / "b", own(order), steps=2, **TENSORS)
    code, said, calls = compared(a, b, tmp_path, capsys)
    assert code == 1, said
    fused = [call for call in calls if "+" in call["b"]]
    assert fused, said
    assert {value["evidence"] for call in fused for value in call["values"]} == {"values"}, said


def test_rows_are_found_among_all_that_fit():
    rng = np.random.default_rng(1)
    parts = [rng.normal(size=(rows, 6)) for rows in (16, 8, 8)]
    of_groups = np.concatenate([each.reshape(GROUPS, -1, 6) for each in parts], 1).reshape(-1, 6)
    for whole, named in ((of_groups, True), (of_groups, False), (np.concatenate([parts[i] for i in (1, 2, 0)]), False)):
        for turned in (False, True):
            given = whole.T if turned else whole
            rows = find_rows(given.shape, [part.shape for part in parts], 0, lambda given=given: [given, *parts], named=named)
            assert rows is not None
            np.testing.assert_array_equal(rows.together(parts, weights=True), given)
    strange = rng.normal(size=(32, 6))
    assert find_rows(strange.shape, [part.shape for part in parts], 0, lambda: [strange, *parts], named=True) is None
    assert DIM * GROUPS == 16
