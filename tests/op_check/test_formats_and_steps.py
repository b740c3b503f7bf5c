"""Formats beside float32 and 16 bits, and operators whose steps round in ways of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check


def outcome(name: str, args: tuple[object, ...], out: torch.Tensor, **kwargs: object) -> str:
    return check(Case(name, args, kwargs, [out])).worst.outcome


def test_float64_is_judged_to_within_its_own_rounding() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 32, dtype=torch.float64), torch.randn(16, 32, dtype=torch.float64)
    y = F.linear(x, w)
    assert outcome("Functional.linear", (x, w), y) == "rounding", "equal bits prove nothing: the reference rounds as well"
    assert outcome("Functional.linear", (x, w), (x[:, ::2] @ w[:, ::2].T) + (x[:, 1::2] @ w[:, 1::2].T)) == "rounding"
    lost = y.clone()
    lost[3, 4] -= x[3, 5] * w[4, 5]
    assert outcome("Functional.linear", (x, w), lost) == "bug"
    assert outcome("Functional.linear", (x, w), y.float().double()) == "bug"
    assert outcome("Functional.gelu", (x,), F.gelu(x)) == "rounding"
    assert outcome("Functional.gelu", (x,), F.gelu(x, approximate="tanh")) == "bug"


def test_a_logarithm_that_cancels_is_rounding() -> None:
    x = torch.tensor([[15.0, 1.0, 0.5], [0.0, 12.0, 3.0]])
    y = F.log_softmax(x, -1)
    assert y.abs().min() < 1e-5
    assert outcome("Aten._log_softmax.default", (x, -1, False), y) in ("rounding", "exact")
    assert outcome("Aten._log_softmax.default", (x, -1, False), y * 1.0001) == "bug"


def test_in_16_bits_the_cell_of_a_place_is_not_known() -> None:
    torch.manual_seed(0)
    x, grid = torch.randn(1, 2, 5, 20, dtype=torch.bfloat16), torch.rand(1, 4, 4, 2, dtype=torch.bfloat16) * 2 - 1
    out = F.grid_sample(x, grid, align_corners=False)
    case = Case("Functional.grid_sample", (x, grid), {"align_corners": False}, [out], [torch.ones_like(out)], [x, grid])
    assert check(case).worst.outcome not in ("bug", "suspicious")
    assert "jumps from cell to cell" in check(case, backward=True).worst.reason


def test_complex_numbers_are_judged_by_both_parts() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(40, 24, dtype=torch.complex64), torch.randn(24, 16, dtype=torch.complex64)
    assert outcome("Torch.matmul", (a, b), a @ b) == "rounding"
    wrong = a @ b
    wrong[3, 4] -= a[3, 0] * b[0, 4]
    assert outcome("Torch.matmul", (a, b), wrong) == "bug"
    assert outcome("Torch.matmul", (a, b), (a.conj() @ b).resolve_conj()) == "bug"
    assert outcome("Torch.mul", (a, a), a * a) in ("rounding", "exact")
    x = torch.randn(3, 64)
    assert outcome("Torch.fft_rfft", (x,), torch.fft.rfft(x)) in ("rounding", "exact")
    assert outcome("Torch.fft_rfft", (x,), torch.fft.rfft(x) * 1.00001) == "bug"


def test_8_bits_are_judged_by_their_own_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        y = x.to(dtype)
        assert outcome("Tensor.to", (x, dtype), y) == "exact"
        off = y.clone()
        off.view(torch.uint8)[5, 6] += 1
        assert outcome("Tensor.to", (x, dtype), off) == "bug"
    small = torch.randn(8, 16).to(torch.float8_e4m3fn)
    wide = small.to(torch.float32)
    assert outcome("Tensor.to", (small, torch.float32), wide) == "exact"
    assert outcome("Tensor.to", (small, torch.float32), wide * 1.001) == "bug"
