"""What ranks hold of an operator's results, told by what they hold of the operands: held against torch, element by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainprobe.dump_compare.layouts.cuts import (
    Along,
    Cut,
    along,
    boxes_of,
    cut_of_boxes,
    flat,
    lays_of_results,
    shape_of_part,
)
from trainprobe.engine.core.records import Call, Opaque

RANKS = 2
ALL, SOME = Opaque("slice", [None, None, None]), Opaque("slice", [None, 2, None])


def part(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """The elements of a rank, one by one."""
    index = [i for i in range(whole.numel()) if i % cut.period // cut.unit == rank]
    shape = shape_of_part(tuple(whole.shape), cut)
    assert shape is not None
    return whole.reshape(-1)[index].reshape(shape)


def cut(shape: tuple[int, ...], dim: int, period: int | None = None) -> Cut:
    period = period or shape[dim]
    found = flat(shape, Along(dim, period // RANKS, period))
    assert found is not None
    return found


def joined(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return torch.cat([x, y], dim)


def first_two(x: Tensor, index: Any) -> Tensor:
    return x[..., :2]


def first_heads(x: Tensor, index: Any) -> Tensor:
    return x[:, :, :2]


HEADS, FLAT, SCORES = (3, 2, 4, 6), (3, 8, 6), (2, 4, 3, 3)
X, GATED, SQUARE = cut(HEADS, -2), cut((3, 2, 8), -1, 4), cut((8, 3, 6), -3, 4)
CASES: dict[str, tuple[str, Any, list[tuple[tuple[int, ...], Cut | None]], tuple[Any, ...], dict[str, Any]]] = {
    # name: operator, function, operands (shape, cut or copy), plain arguments by place, by keyword
    "heads taken apart": ("Tensor.view", torch.Tensor.view, [((3, 2, 24), cut((3, 2, 24), -1))], (3, 2, -1, 6), {}),
    "heads merged with samples": ("Tensor.reshape", torch.Tensor.reshape, [(HEADS, X)], (3, -1, 6), {}),
    "first dimensions swapped": ("Tensor.transpose", torch.transpose, [(FLAT, cut(FLAT, -2, 4))], (0, 1), {}),
    "transposed": ("Tensor.t", torch.t, [((4, 6), cut((4, 6), -1))], (), {}),
    "permuted": ("Tensor.permute", torch.permute, [(SCORES, cut(SCORES, -3))], ([2, 0, 1, 3],), {}),
    "split beside it": ("Torch.split", torch.split, [(HEADS, X)], ([4, 1, 1], 3), {}),
    "split along it": ("Torch.split", torch.split, [(HEADS, X)], ([2, 2], 2), {}),
    "gate and up": ("Torch.chunk", torch.chunk, [((3, 2, 8), GATED)], (2,), {"dim": -1}),
    "halves of what is no gate": ("Torch.chunk", torch.chunk, [((3, 2, 8), cut((3, 2, 8), -1))], (2,), {"dim": -1}),
    "rotated": ("Torch.cat", joined, [(HEADS, X), (HEADS, X)], (), {"dim": -1}),
    "put behind each other along it": ("Torch.cat", joined, [(HEADS, X), (HEADS, X)], (), {"dim": 2}),
    "broadcast": ("Tensor.mul", torch.mul, [(HEADS, X), ((3, 1, 1, 6), None)], (), {}),
    "a factor for each head": ("Tensor.mul", torch.mul, [(HEADS, X), ((4, 1), None)], (), {}),
    "two cuts": ("Tensor.mul", torch.mul, [(HEADS, X), (HEADS, cut(HEADS, -1))], (), {}),
    "softmax beside it": ("Functional.softmax", functional.softmax, [(SCORES, cut(SCORES, -3))], (-1,), {}),
    "softmax along it": ("Functional.softmax", functional.softmax, [(SCORES, cut(SCORES, -3))], (1,), {}),
    "layer norm of heads": ("Functional.layer_norm", functional.layer_norm, [(HEADS, X)], ([6],), {}),
    "layer norm over heads": ("Functional.layer_norm", functional.layer_norm, [(HEADS, X)], ([4, 6],), {}),
    "columns": ("Torch.matmul", torch.matmul, [((3, 2, 6), None), ((6, 8), cut((6, 8), -1, 4))], (), {}),
    "rows": ("Torch.matmul", torch.matmul, [((3, 2, 8), cut((3, 2, 8), -1)), ((8, 6), cut((8, 6), -2))], (), {}),
    "rows in another order": ("Torch.matmul", torch.matmul, [((3, 2, 8), GATED), ((8, 6), cut((8, 6), -2))], (), {}),
    "tokens": ("Torch.matmul", torch.matmul, [((4, 2, 6), cut((4, 2, 6), -3)), ((6, 5), None)], (), {}),
    "batches": ("Torch.bmm", torch.bmm, [((8, 3, 6), SQUARE), ((8, 6, 3), cut((8, 6, 3), -3, 4))], (), {}),
    "batches in another order": ("Torch.bmm", torch.bmm, [((8, 3, 6), SQUARE), ((8, 6, 3), cut((8, 6, 3), -3))], (), {}),
    "a linear layer's columns": (
        "Functional.linear",
        functional.linear,
        [((3, 6), None), ((8, 6), cut((8, 6), -2, 4)), ((8,), cut((8,), -1, 4))],
        (),
        {},
    ),
    "a linear layer's rows": (
        "Functional.linear",
        functional.linear,
        [((3, 8), cut((3, 8), -1)), ((6, 8), cut((6, 8), -1))],
        (),
        {},
    ),
    "a bias in each term": (
        "Functional.linear",
        functional.linear,
        [((3, 8), cut((3, 8), -1)), ((6, 8), cut((6, 8), -1)), ((6,), None)],
        (),
        {},
    ),
    "groups repeated": ("Tensor.repeat_interleave", torch.repeat_interleave, [(HEADS, X)], (3,), {"dim": 2}),
    "some of each head": ("Tensor.__getitem__", first_two, [(HEADS, X)], ([Opaque("ellipsis", "..."), SOME],), {}),
    "some heads": ("Tensor.__getitem__", first_heads, [(HEADS, X)], ([ALL, ALL, SOME],), {}),
    "sum over heads": ("Tensor.sum", torch.sum, [(HEADS, X)], (2,), {}),
    "places among heads": ("Tensor.argsort", torch.argsort, [(HEADS, X)], (2,), {}),
}
NOT_PROVEN = {
    *("split along it", "halves of what is no gate", "put behind each other along it", "a factor for each head", "two cuts"),
    *("softmax along it", "layer norm over heads", "rows in another order", "batches in another order", "a bias in each term"),
    *("some heads", "sum over heads", "places among heads"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_a_result_are_those_that_the_cut_says(name):
    op, function, operands, by_place, by_name = CASES[name]
    torch.manual_seed(0)
    wholes = [torch.randn(shape, dtype=torch.float64) for shape, _ in operands]
    call = Call("op", op, 0, "forward")
    call.args, call.kwargs = [*([None] * (1 if "cat" in op else len(wholes))), *by_place], by_name
    given = {f"input.{i}": (shape, of or "copy") for i, (shape, of) in enumerate(operands)}

    def results(tensors: list[Tensor], sizes: tuple[Any, ...] = by_place) -> list[Tensor]:
        out = function(*tensors, *sizes, **by_name)
        return list(out) if isinstance(out, tuple) else [out]

    expected = results(wholes)
    shapes = {f"output.{i}": tuple(out.shape) for i, out in enumerate(expected)}
    found = lays_of_results(op.rpartition(".")[2].strip("_"), call, given, shapes)
    assert (found is None) == (name in NOT_PROVEN)
    if found is None:
        return
    ranks = [
        results([whole if of is None else part(whole, of, rank) for whole, (_, of) in zip(wholes, operands, strict=True)])
        for rank in range(RANKS)
    ]
    for i, lay in enumerate(found.values()):
        if lay == "sum":
            assert torch.allclose(sum(of_rank[i] for of_rank in ranks), expected[i])
            continue
        assert isinstance(lay, Cut)
        for rank, of_rank in enumerate(ranks):
            assert torch.allclose(of_rank[i], part(expected[i], lay, rank))


def test_a_cut_is_found_again_along_its_dimension():
    for shape in ((4, 6, 8), (8,), (2, 1, 4)):
        for dim in range(-len(shape), 0):
            if shape[dim] % RANKS == 0:
                assert along(shape, cut(shape, dim)) == Along(dim, shape[dim] // RANKS, shape[dim])
    assert along((3, 5), Cut(1, 2)) is None
    assert along((3, 0), Cut(1, 2)) is None


def test_rectangles_make_a_cut_and_a_cut_makes_rectangles():
    boxes = boxes_of((4, 6), cut((4, 6), -1), RANKS)
    assert [box.offset for box in boxes] == [(0, 0), (0, 3)]
    assert cut_of_boxes(boxes, (4, 6)) == cut((4, 6), -1)
    assert cut_of_boxes(boxes[::-1], (4, 6)) is None  # ranks in another order
    assert cut_of_boxes([*boxes, None], (4, 6)) is None
    assert boxes_of((3, 2, 8), GATED, RANKS) == []  # of a gate and what it gates no rank holds one rectangle
    assert math.prod(shape_of_part((3, 2, 8), GATED) or ()) == 24
