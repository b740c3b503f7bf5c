"""Two versions of a library that call the parameters of all layers otherwise."""

import numpy as np
import pytest

from tests.ckpt_compare.memory import checkpoint, tensor
from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.verdict import verdict_of

NEW = {"attention.output.dense": "attention.o_proj", "attention.key": "attention.k_proj", "output.dense": "mlp.fc2"}


def model():
    g = np.random.default_rng(0)
    held = {f"encoder.layer.{i}.{part}.weight": g.standard_normal((8, 8)) for i in range(4) for part in NEW}
    return {"cls_token": g.standard_normal((1, 8)), **held}


def newer(held, first=0):
    """The same under the names of another version, which may count its layers from another number."""

    def name(key):
        if key == "cls_token":
            return key
        _, _, number, part = key.removesuffix(".weight").split(".", 3)
        return f"model.layers.{int(number) + first}.{NEW[part]}.weight"

    return {name(key): value for key, value in held.items()}


def judged(a, b):
    found = compare(*(checkpoint(*(tensor(k, v) for k, v in held.items())) for held in (a, b)))
    return verdict_of(found), found


def exchange(held, one, other):
    for key in [k for k in held if f".{one}." in k]:
        held[key], held[key.replace(f".{one}.", f".{other}.")] = held[key.replace(f".{one}.", f".{other}.")], held[key]


@pytest.mark.parametrize("first", [0, 1])
def test_the_same_layers_under_other_names_are_identical(first):
    verdict, found = judged(model(), newer(model(), first))
    assert (
        verdict.sentence
        == "identical: 13 weights tensors (776 elements) hold the same values in both, 12 of them under other names"
    )
    assert len(found.renamed) == 12


def test_layers_that_are_exchanged_as_well_are_not_identical():
    b = model()
    exchange(b, 0, 2)
    verdict, _ = judged(model(), newer(b))
    assert verdict.code == 2
    assert verdict.sentence.startswith("differ: layers 0 and 2 are exchanged. 6 of 13 tensors")


def test_a_renamed_tensor_that_differs_is_a_difference_and_not_a_missing_one():
    b = model()
    b["encoder.layer.1.output.dense.weight"][2, 5] += 1
    verdict, found = judged(model(), newer(b))
    assert verdict.code == 2
    assert "1 of 13 tensors; worst is encoder.layer.1.output.dense.weight: " in verdict.sentence
    row = next(r for r in found.rows if r.verdict == "differ")
    assert row.note.startswith("named model.layers.1.mlp.fc2.weight in B")
    assert row.native_b == "model.layers.1.mlp.fc2.weight"


def test_a_kind_that_holds_nothing_equal_is_paired_only_where_no_other_is_left():
    b = {k: v * 2 if ".output.dense" in k and "attention" not in k else v for k, v in model().items()}
    verdict, _ = judged(model(), newer(b))
    assert verdict.sentence.startswith(
        "differ: 4 tensors, such as encoder.layer.0.output.dense.weight, are 2 times as large in B"
    )
    b = {k: v if k == "cls_token" or ".key." in k else v + 1 for k, v in model().items()}
    verdict, _ = judged(model(), newer(b))
    assert verdict.code == 3
    assert "8 tensors are only in A, 8 tensors are only in B" in verdict.sentence
