"""Kernels that the judge was not calibrated on: what the first, blind run of them missed (docs/op_check.md) is mended."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.op_check import held_out
from benchmarks.op_check.planted import Plant, judged
from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check

WRONG = ("bug", "suspicious")
BELOW_ROUNDING = {"Torch.sum leaves_one_of_4096"}  # 64 sums in bfloat16, each off by a tenth of a rounding


@pytest.mark.parametrize("one", held_out.FAULTS, ids=[one.name for one in held_out.FAULTS])
def test_a_fault_is_found(one: Plant) -> None:
    assert (judged(one).worst.outcome in WRONG) != (one.name in BELOW_ROUNDING)


@pytest.mark.parametrize("one", held_out.RIGHT, ids=[one.name for one in held_out.RIGHT])
def test_a_right_kernel_is_not_accused(one: Plant) -> None:
    assert judged(one).worst.outcome in held_out.GOOD


def pool(x: torch.Tensor, g: torch.Tensor, result: torch.Tensor) -> str:
    case = Case("Functional.max_pool2d", (x, 3, 2), {}, [F.max_pool2d(x, 3, 2)], [g], [result], of_inputs=True)
    return check(case, backward=True).worst.outcome


def test_among_equal_elements_any_may_get_the_gradient_and_others_may_not() -> None:
    torch.manual_seed(0)
    x = F.relu(torch.randn(2, 3, 9, 9).round()).to(torch.bfloat16)
    values, places = F.max_pool2d(x.flip(2, 3), 3, 2, return_indices=True)
    g = torch.randn(values.shape).to(torch.bfloat16)
    last = torch.zeros(2, 3, 81).scatter_add_(2, places.flatten(2), g.flip(2, 3).float().flatten(2)).view(2, 3, 9, 9)
    last = last.flip(2, 3).to(torch.bfloat16)
    first = x.clone().requires_grad_()
    F.max_pool2d(first, 3, 2).backward(g)
    assert first.grad is not None
    assert not torch.equal(first.grad, last), "there are ties"
    assert pool(x, g, first.grad) in ("exact", "rounding")
    assert pool(x, g, last) == "unspecified"
    moved = last.clone()
    at = tuple((last != 0).nonzero()[5])
    moved[at] = 0
    assert pool(x, g, moved) == "bug", "its sum is another"
    assert pool(x, g, last.roll(1, 3)) == "bug"


def test_an_index_out_of_its_window_is_a_bug() -> None:
    x = torch.zeros(1, 1, 6, 6)
    values, places = F.max_pool2d(x, 2, 2, return_indices=True)
    case = Case("Functional.max_pool2d", (x, 2, 2), {"return_indices": True}, [values, places])
    assert check(case).worst.outcome == "unspecified"
    case.outputs = [values, places.flip(2, 3)]
    assert check(case).worst.outcome == "bug", "all elements are equal, and these lie elsewhere"
