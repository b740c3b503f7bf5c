"""Formats beside float32 and 16 bits, and operators whose steps round in ways of their own."""

from __future__ import annotations

import numpy as np
import pytest
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
    assert outcome("Functional.linear", (x, w), y) == "rounding"
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


def scaled(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, **scales: torch.Tensor) -> str:
    return outcome("Torch._scaled_mm", (a, b), y, **scales, out_dtype=y.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_8_bit_matrices_are_judged_with_their_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(32, 64).to(dtype), torch.randn(16, 64).to(dtype).t()
    one = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(3.0)}
    rows = {"scale_a": torch.rand(32, 1), "scale_b": torch.rand(1, 16)}
    for scales in (one, rows):
        for out in (torch.bfloat16, torch.float32):
            y = torch._scaled_mm(a, b, **scales, out_dtype=out)
            assert scaled(a, b, y, **scales) in ("exact", "rounding")
            assert scaled(a, b, torch._scaled_mm(a, b.roll(1, 1), **scales, out_dtype=out), **scales) == "bug"
    y = torch._scaled_mm(a, b, **rows, out_dtype=torch.float32)
    assert scaled(a, b, y, scale_a=rows["scale_a"].roll(1, 0), scale_b=rows["scale_b"]) == "bug"


@pytest.mark.parametrize("tiled", [False, True])
def test_block_formats_have_a_scale_for_32_numbers(tiled: bool) -> None:
    """NumPy multiplies what MX numbers stand for; torch has no kernel for them on the CPU."""
    torch.manual_seed(0)
    m, n, k = 96, 130, 128
    a, b = (torch.randn(r, k).to(torch.float8_e4m3fn) for r in (m, n))
    p, q = (torch.exp2(torch.randint(-3, 4, (r, k // 32)).float()).to(torch.float8_e8m0fnu) for r in (m, n))
    wide = [x.float().numpy().astype(np.float64) * np.repeat(s.float().numpy(), 32, 1) for x, s in ((a, p), (b, q))]
    y = torch.from_numpy(wide[0] @ wide[1].T).to(torch.bfloat16)
    wrong = torch.from_numpy(wide[0] @ np.roll(wide[1], 1, 0).T).to(torch.bfloat16)
    scales = {"scale_a": in_tiles(p), "scale_b": in_tiles(q)} if tiled else {"scale_a": p, "scale_b": q.t()}
    assert scaled(a, b.t(), y, **scales) in ("exact", "rounding")
    assert scaled(a, b.t(), wrong, **scales) == "bug"


def in_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Lay scales out in tiles: row r, block c at tile (r // 128, c // 4), there at (r % 32, r % 128 // 32, c % 4)."""
    rows, blocks = scale.shape
    tall, wide = -(-rows // 128), -(-blocks // 4)
    bits = scale.view(torch.uint8)
    laid = torch.zeros(tall * wide * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(blocks):
            laid[(r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = bits[r, c]
    return laid.view(torch.float8_e8m0fnu)


def test_conversions_to_8_bits_may_saturate_and_round_halves_their_own_way() -> None:
    x = torch.tensor([1.125, 1.375, 3.0, 70000.0, -80000.0])
    y = x.to(torch.float8_e5m2)
    assert y.isinf().sum() == 2
    assert outcome("Tensor.to", (x, torch.float8_e5m2), y) == "exact"
    other = torch.tensor([1.25, 1.25, 3.0, 57344.0, -57344.0]).to(torch.float8_e5m2)
    assert outcome("Tensor.to", (x[:3], torch.float8_e5m2), other[:3]) == "rounding"
    assert outcome("Tensor.to", (x, torch.float8_e5m2), other) == "mode"
    assert outcome("Tensor.to", (x, torch.float8_e5m2), other[[4, 1, 2, 3, 0]]) == "bug"
    assert outcome("Tensor.to", (x[:3] + 0.01, torch.float8_e5m2), torch.tensor([1.0, 1.5, 3.0]).to(torch.float8_e5m2)) == "bug"
