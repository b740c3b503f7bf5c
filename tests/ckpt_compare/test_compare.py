from dataclasses import replace

import numpy as np
import pytest

from tests.ckpt_compare.memory import checkpoint, tensor
from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.pieces import Problem
from trainprobe.ckpt_compare.verdict import verdict_of

RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 6)).astype(np.float32)


def code(a, b, *args, **kwargs):
    return verdict_of(compare(a, b, *args, **kwargs)).code


def sentence(a, b, *args):
    return verdict_of(compare(a, b, *args)).sentence


def details(a, b, *args):
    found = verdict_of(compare(a, b, *args))
    return "\n".join([found.sentence, *found.details])


def layers(n=4, seed=0):
    """A model of n layers, each with its own numbers."""
    rng = np.random.default_rng(seed)
    return {
        f"layers.{i}.{p}": rng.standard_normal((6, 4)).astype(np.float32) for i in range(n) for p in ("q.weight", "mlp.weight")
    }


def of(arrays, **more):
    return checkpoint(*(tensor(k, v) for k, v in arrays.items()), **more)


def test_the_same_numbers_give_zero():
    assert code(of({"w": W}), of({"w": W.copy()})) == 0


def test_neighbouring_numbers_give_one():
    assert code(of({"w": W}), of({"w": np.nextafter(W, np.float32(9))})) == 1


def test_other_numbers_give_two():
    assert code(of({"w": W}), of({"w": W + 1})) == 2


def test_a_missing_tensor_gives_three():
    assert code(of({"w": W, "v": W}), of({"w": W})) == 3


def test_a_missing_tensor_is_named():
    assert "v: only in A" in details(of({"w": W, "v": W}), of({"w": W}))


def test_nothing_in_common_gives_three():
    assert code(of({"w": W}), checkpoint(tensor("w", W, slot="exp_avg"))) == 3


def test_another_shape_gives_three_and_both_shapes_are_said():
    a, b = of({"w": W}), of({"w": W[:, :5]})
    assert code(a, b) == 3
    assert "[8, 6] and [8, 5]" in details(a, b)


def test_a_difference_outweighs_a_missing_tensor():
    assert code(of({"w": W, "v": W}), of({"w": W + 1})) == 2


def test_an_unreadable_file_gives_three_though_all_else_agrees():
    assert code(of({"w": W}), of({"w": W}, problems=(Problem("rank 3", "is truncated"),))) == 3


def test_an_unreadable_file_is_named():
    assert "rank 3" in details(of({"w": W}), of({"w": W}, problems=(Problem("rank 3", "is truncated"),)))


def test_the_worst_tensor_stands_in_the_first_line_with_the_place_of_its_worst_element():
    b = {"w": W.copy(), "v": W.copy()}
    b["v"][3, 4] += 5
    said = sentence(of({"w": W, "v": W}), of(b))
    assert "worst is v" in said
    assert "[3, 4]" in said
    assert "1 of 48 elements" in said


def test_the_file_that_holds_the_worst_element_is_named():
    b = W.copy()
    b[6, 1] += 5
    cut = [((0, 0), (4, 6)), ((4, 0), (4, 6))]
    assert "rank 1: w" in sentence(checkpoint(tensor("w", W, cut)), checkpoint(tensor("w", b, cut)))


def test_copies_that_drifted_apart_inside_one_checkpoint_are_a_failure_with_names():
    drifted = tensor("norm.weight", W, [((0, 0), (8, 6)), ((0, 0), (8, 6))])
    drifted.pieces[1].source.bits[2, 2] += 1
    a, b = of({"norm.weight": W}), checkpoint(drifted)
    assert code(a, b) == 2
    assert "norm.weight: copies disagree in 1 of 48 elements" in details(a, b)
    assert "rank 0: norm.weight and rank 1: norm.weight" in details(a, b)


def test_copies_can_be_left_unlooked_at():
    drifted = tensor("w", W, [((0, 0), (8, 6)), ((0, 0), (8, 6))])
    drifted.pieces[1].source.bits[2, 2] += 1
    assert code(of({"w": W}), checkpoint(drifted), copies=False) == 0


def test_a_float32_tensor_and_its_bfloat16_rounding_are_equal_within_rounding():
    import torch

    half = torch.from_numpy(W).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert code(of({"w": W}), checkpoint(tensor("w", half, dtype="bfloat16"))) == 1


PADDED = np.concatenate([W, RNG.standard_normal((24, 6)).astype(np.float32)])


def vocabularies(other=W, a=None, b=None):
    """Return two checkpoints with embeddings of 8 and 32 rows, and what each says of its vocabulary."""
    pairs = ((other, a), (PADDED, b))
    return [checkpoint(tensor("embedding.word.weight", x, vocabulary=True), config=config or {}) for x, config in pairs]


@pytest.mark.parametrize(
    ("a", "b"), [({}, {"vocab_multiple": 32}), ({}, {"vocab": 8}), ({"vocab": 7}, {}), ({"vocab": 8}, {"vocab_multiple": 2})]
)
def test_vocabulary_padding_that_the_metadata_states_is_left_out_and_said(a, b):
    assert code(*vocabularies(a=a, b=b)) == 0
    assert "rows 8 to 31 are vocabulary padding in B" in details(*vocabularies(a=a, b=b))


@pytest.mark.parametrize("b", [{}, {"vocab_multiple": 16}, {"vocab": 9}, {"vocab_multiple": 48}])
def test_rows_that_no_metadata_calls_padding_are_missing_on_the_other_side(b):
    assert code(*vocabularies(b=b)) == 3
    assert "rows 8 to 31 are only in B, and no metadata says that they are padding" in details(*vocabularies(b=b))


def test_a_difference_in_the_common_rows_of_two_vocabularies_is_a_difference():
    assert code(*vocabularies(other=W + 1)) == code(*vocabularies(other=W + 1, b={"vocab_multiple": 32})) == 2


def test_a_head_tied_to_the_embedding_on_one_side_is_held_against_the_embedding():
    a = of({"embedding.word.weight": W})
    other = of({"embedding.word.weight": W, "output.weight": W + 1})
    assert code(a, of({"embedding.word.weight": W, "output.weight": W})) == 0
    assert code(replace(a, config={"tied": True}), other) == 2
    assert code(a, other) == 3  # nothing says that A is tied, and B is not: A may have lost its head
    assert "output.weight: only in B, lost in A, as the other side shows that it is not tied" in details(a, other)


def test_an_optimizer_on_one_side_only_is_said_and_not_counted():
    a = checkpoint(tensor("w", W), tensor("w", W, slot="exp_avg"))
    assert code(a, of({"w": W})) == 0
    assert "optimizer: only in A" in details(a, of({"w": W}))


def test_a_moment_missing_on_one_side_gives_three():
    a = checkpoint(tensor("w", W), tensor("w", W, slot="exp_avg"), tensor("v", W), tensor("v", W, slot="exp_avg"))
    b = checkpoint(tensor("w", W), tensor("w", W, slot="exp_avg"), tensor("v", W))
    assert code(a, b) == 3


def test_zeroed_moments_are_named():
    a = checkpoint(tensor("w", W), tensor("w", W, slot="exp_avg"))
    b = checkpoint(tensor("w", W), tensor("w", 0 * W, slot="exp_avg"))
    assert "w#exp_avg is all zeros in B" in details(a, b)


def test_only_what_was_asked_for_counts():
    a = checkpoint(tensor("w", W), tensor("w", W, slot="exp_avg"))
    b = checkpoint(tensor("w", W), tensor("w", W + 1, slot="exp_avg"))
    assert (code(a, b, ["weights"]), code(a, b)) == (0, 2)


def test_swapped_layers_are_named():
    a = layers()
    b = dict(a)
    for p in ("q.weight", "mlp.weight"):
        b[f"layers.0.{p}"], b[f"layers.2.{p}"] = a[f"layers.2.{p}"], a[f"layers.0.{p}"]
    said = details(of(a), of(b))
    assert "layers.2 of B holds layers.0 of A (2 tensors)" in said
    assert "layers.0 of B holds layers.2 of A (2 tensors)" in said


def test_a_transposed_tensor_is_named():
    a = {"w": RNG.standard_normal((5, 5)).astype(np.float32)}
    assert "w is transposed in B" in details(of(a), of({"w": np.ascontiguousarray(a["w"].T)}))


def test_tensors_are_found_by_content_when_names_do_not_lead_to_each_other():
    a = layers()
    assert code(of(a), of({k.replace("layers", "blocks").replace("mlp", "ffn"): v for k, v in a.items()})) == 0


def test_content_is_found_across_number_formats():
    import torch

    a = layers()
    halves = {k: torch.from_numpy(v).bfloat16().view(torch.int16).numpy().view(np.uint16) for k, v in a.items()}
    assert (
        code(of(a), checkpoint(*(tensor("other." + k.replace(".", "_"), v, dtype="bfloat16") for k, v in halves.items()))) == 1
    )


def test_constants_say_nothing_about_where_they_belong():
    ones = {f"layers.{i}.norm.weight": np.ones(7, np.float32) for i in range(3)}
    changed = {**ones, "layers.1.norm.weight": np.full(7, 2, np.float32)}
    assert compare(of(ones), of(changed)).moves == ()


def test_a_wrapper_s_prefix_on_one_side_is_left_out():
    a = layers()
    assert code(of(a), of({f"net.model.{k}": v for k, v in a.items()})) == 0


def test_a_step_count_that_is_not_the_same_counts_with_the_optimizer():
    a, b = (checkpoint(tensor("w", W), state={"optimizer": {"step": n}}) for n in (2, 3))
    assert code(a, b) == 2
    assert "step is 2 in A and 3 in B" in sentence(a, b)


def test_an_rng_state_of_another_rank_is_named():
    a = checkpoint(tensor("w", W), state={"rng": {"rank 0/torch": "aaaa", "rank 1/torch": "bbbb"}})
    b = checkpoint(tensor("w", W), state={"rng": {"rank 0/torch": "bbbb", "rank 1/torch": "bbbb"}})
    assert "B's rank 0 holds the state of A's rank 1" in details(a, b)
    assert (code(a, b), code(a, b, ["weights", "rng"])) == (0, 2)


def test_a_scalar_and_an_empty_tensor_are_compared():
    a = {"s": np.float32(1).reshape(()), "e": np.zeros((0, 4), np.float32)}
    assert code(of(a), of(a)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_or_infinity_on_one_side_is_a_difference(value):
    b = W.copy()
    b[1, 1] = value
    assert code(of({"w": W}), of({"w": b})) == 2
