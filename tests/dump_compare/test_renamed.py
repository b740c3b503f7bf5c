"""Two implementations of one network, whose modules have other names, are paired by structure."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.dump_compare.renamed_models import Own, Wrapped, hugging_face, llama, own, phi, train
from trainprobe.cli import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = {"level": "L0", "summary": "both"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return a function that gives the dump of the Hugging Face model under a plan."""
    folder, made = tmp_path_factory.mktemp("theirs"), {}

    def dump(**plan):
        name = "-".join(map(str, plan.values()))
        if name not in made:
            made[name] = train(folder / name, hugging_face(), steps=2, **plan)
        return made[name]

    return dump


@pytest.fixture
def compared(tmp_path, capsys):
    """Return a function that compares two dumps and gives the exit code, what was printed, and what was written as JSON."""

    def compare(a, b, *more):
        capsys.readouterr()
        code = main(["dump-compare", str(a), str(b), "--json", str(tmp_path / "all.json"), *map(str, more)])
        return code, capsys.readouterr().out, json.loads((tmp_path / "all.json").read_bytes())

    return compare


def partners(document):
    """Return module of A → (module of B, evidence) of forward calls that were not paired by name."""
    calls = [call for call in document["calls"] if call["paired_by"] not in ("", "name") and ".forward." in call["a"]]
    name = lambda entry: ".".join(entry.split(".")[1:-3])  # noqa: E731
    return {name(call["a"]): (name(call["b"]), call["paired_by"]) for call in calls}


@pytest.mark.parametrize("plan", [BOTH, {"level": "L0", "task": "tensor"}, {"level": "mix", "summary": "statistics"}])
def test_another_implementation_agrees_within_rounding(tmp_path, theirs, compared, plan):
    code, said, document = compared(theirs(**plan), train(tmp_path / "b", own(), steps=2, **plan))
    assert code == 1 and "22 modules of A have other names in B and were paired by structure (11 by equal weights" in said
    found = partners(document)
    assert found["transformer.wpe"] == ("places", "equal weights")
    assert found["transformer.h.1.attn.c_attn"] == ("layers.1.attention.qkv", "equal weights")
    assert found["transformer.h.1.ln_2"] == ("layers.1.between", "order of calls and shapes")
    assert found["transformer.h.0.mlp.act"] == ("layers.0.act", "order of calls and shapes")
    assert found["transformer.h.1.attn"] == ("layers.1.attention", "what it calls")
    assert found["transformer.h.1"] == ("layers.1", "what it calls")
    assert "8 modules of A have no partner and are left out" in said


def other_weight(model):
    model.layers[1].attention.project.weight[3, 4] += 0.1


def other_norm(model):
    model.layers[1].between.weight[7] *= 1.1


def other_eps(model):
    model.layers[0].between.eps = 1e-2


def other_act(model):
    model.layers[1].act = nn.GELU()


def gradient_scaled(model):
    model.layers[0].up.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 1.01,))


PLANTED = {
    "weight": (other_weight, "h.1.attn.c_proj.Conv1D.forward.0, Module.layers.1.attention.project.Linear.forward.0 in B"),
    "norm": (other_norm, "h.1.ln_2.LayerNorm.forward.0, Module.layers.1.between.LayerNorm.forward.0 in B"),
    "eps": (other_eps, "h.0.ln_2.LayerNorm.forward.0, Module.layers.0.between.LayerNorm.forward.0 in B"),
    "activation": (other_act, "h.1.mlp.act.NewGELUActivation.forward.0, Module.layers.1.act.GELU.forward.0 in B"),
    "gradient": (gradient_scaled, "h.0.mlp.c_fc.Conv1D.backward.0, Module.layers.0.up.Linear.backward.0 in B"),
}


@pytest.mark.parametrize("change", PLANTED)
@pytest.mark.parametrize("plan", [BOTH, {"level": "L0", "task": "tensor"}])
def test_a_planted_difference_is_named_with_both_names(tmp_path, theirs, compared, change, plan):
    meddle, place = PLANTED[change]
    code, said, _ = compared(theirs(**plan), train(tmp_path / "b", own(), meddle, steps=2, **plan))
    assert code == 2 and f"Module.transformer.{place}, (step 0" in said.splitlines()[0], said.splitlines()[0]


def test_a_wrapper_changes_no_verdict(tmp_path, compared):
    a = train(tmp_path / "a", own(), level="mix", summary="both")
    b = train(tmp_path / "b", Wrapped(Wrapped(own())), level="mix", summary="both")
    code, said, document = compared(a, b)
    assert code == 0 and "2 modules of B have no partner and are left out" in said
    assert partners(document)["layers.1.attention.qkv"] == ("inner.inner.layers.1.attention.qkv", "equal weights")


def test_weights_tell_modules_that_are_called_in_another_order(tmp_path, compared):
    a, b = (train(tmp_path / order, Wrapped(own(order)) if order == "kvq" else own(order), **BOTH) for order in ("qkv", "kvq"))
    code, _, document = compared(a, b)
    assert code <= 1
    found = partners(document)
    assert {name: found[f"layers.0.attention.{name}"] for name in "qkv"} == {
        name: (f"inner.layers.0.attention.{name}", "equal weights") for name in "qkv"
    }


def test_models_of_other_weights_are_paired_and_not_the_same(tmp_path, theirs, compared):
    code, said, document = compared(theirs(**BOTH), train(tmp_path / "b", own(seed=5), **BOTH))
    assert code == 2 and "the weights differ" in said.splitlines()[0]
    assert partners(document)["transformer.h.1.mlp.c_fc"] == ("layers.1.up", "order of calls and shapes")


def test_layers_in_another_order_are_not_the_same(tmp_path, theirs, compared):
    def swap(model):
        model.layers = nn.ModuleList([model.layers[1], model.layers[0]])

    code, _, document = compared(theirs(**BOTH), train(tmp_path / "b", own(), swap, **BOTH))
    assert code == 2
    assert partners(document)["transformer.h.1.mlp.c_fc"] == ("layers.0.up", "equal weights")


def test_a_layer_that_is_lacking_is_no_agreement(tmp_path, theirs, compared):
    torch.manual_seed(0)
    assert compared(theirs(**BOTH), train(tmp_path / "b", Own(layers=1), **BOTH))[0] >= 2


def test_fingerprints_alone_are_no_agreement_of_two_implementations(tmp_path, theirs, compared):
    plan = {"level": "L0", "summary": "checksum"}
    assert compared(theirs(**plan), train(tmp_path / "b", own(), **plan))[0] >= 2


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Return dumps of a Llama, whose projections are modules of their own: of statistics, and of tensors."""
    folder = tmp_path_factory.mktemp("split")
    return {task: train(folder / task, llama(), steps=2, level="L0", task=task) for task in ("statistics", "tensor")}


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_fused_projections_belong_to_those_that_they_are_made_of(tmp_path, split, compared, task):
    fused = train(tmp_path / "b", phi(), steps=2, level="L0", task=task)
    for sides, parts in (((split[task], fused), "q_proj+k_proj+v_proj and "), ((fused, split[task]), "qkv_proj and ")):
        code, said, document = compared(*sides)
        assert code == 1, said
        assert "4 times several modules of one side are one of the other (4 by names of both families)" in said, said
        assert parts in said
        calls = [call for call in document["calls"] if "gate_proj+up_proj" in f"{call['a']} {call['b']}"]
        assert {call["paired_by"] for call in calls} == {"names of both families"}
        by_what = {each["evidence"] for call in calls for each in call["values"] if each["slot"] in ("output", "weight")}
        assert by_what == {"values" if task == "tensor" else "statistics"}


def other_gate(model):
    model.model.layers[1].mlp.gate_proj.weight[3, 4] += 0.3


def other_values(model):
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, given, made: made * 1.01)


def other_gradient(model):
    model.model.layers[1].self_attn.k_proj.weight.register_hook(lambda gradient: gradient * 1.5)


IN_FUSED = {
    "weight": (
        other_gate,
        "layers.1.mlp.gate_up_proj.Linear.forward.0, Module.model.layers.1.mlp.gate_proj+up_proj.Linear.forward.0",
    ),
    "activation": (
        other_values,
        "layers.0.self_attn.qkv_proj.Linear.forward.0, Module.model.layers.0.self_attn.q_proj+k_proj+v_proj.Linear.forward.0",
    ),
    "gradient": (
        other_gradient,
        "layers.1.self_attn.qkv_proj.Linear.parameters_grad.0, "
        "Module.model.layers.1.self_attn.q_proj+k_proj+v_proj.Linear.parameters_grad.0",
    ),
}


@pytest.mark.parametrize("change", IN_FUSED)
def test_a_difference_in_a_part_of_what_is_fused_is_named(tmp_path, compared, change):
    meddle, place = IN_FUSED[change]
    a = train(tmp_path / "a", phi(), level="L0")
    code, said, _ = compared(a, train(tmp_path / "b", llama(), meddle, level="L0"))
    assert code == 2 and f"Module.model.{place} in B, (step 0" in said.splitlines()[0], said.splitlines()[0]
