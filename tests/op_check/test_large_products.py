"""Large products of matrices are judged by some of their rows and by sums of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trainprobe.op_check import large_products
from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import Checked, check
from trainprobe.op_check.large_products import ROWS, parts

Tensor = torch.Tensor
_M, _K, _N = 512, 128, 384


@pytest.fixture(autouse=True)
def _large_is_smaller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "as_large_as_it_says" not in request.fixturenames:
        monkeypatch.setattr(large_products, "LARGE", 1 << 23)


@pytest.fixture
def as_large_as_it_says() -> int:
    """Leave the limit as it is."""
    return large_products.LARGE


def linear(dtype: torch.dtype = torch.float32, weights: torch.dtype | None = None) -> Case:
    """Return a call of three dimensions, with the gradients of its arguments, as torch makes them here."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, _M // 4, _K, generator=generator).to(dtype)
    w, b = (torch.randn(*s, generator=generator).to(weights or dtype) for s in ((_N, _K), (_N,)))
    g = torch.randn(4, _M // 4, _N, generator=generator).to(dtype)
    return filled("Functional.linear", F.linear, (x, w, b), g)


def filled(name: str, call: Callable[..., Tensor], args: tuple[Tensor, ...], g: Tensor) -> Case:
    leaves = [a.clone().requires_grad_() for a in args]
    y = call(*[a.to(g.dtype) for a in leaves])
    results = torch.autograd.grad(y, leaves, g)
    return Case(name, args, {}, [y.detach()], [g], results, [True] * len(args), of_inputs=True)


def with_result(case: Case, index: int, change: Callable[[Tensor], Tensor], backward: bool) -> Case:
    kept = list(case.results if backward else case.outputs)
    before = kept[index]
    assert before is not None
    kept[index] = change(before)
    return replace(case, results=kept) if backward else replace(case, outputs=kept)


def outcomes(checked: Checked) -> list[str]:
    return [j.outcome for j in checked.judgements]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_right_products_are_right_by_their_rows(dtype: torch.dtype, backward: bool) -> None:
    case = linear(dtype)
    assert parts(case, backward) is not None
    found = check(case, backward)
    assert set(outcomes(found)) <= {"exact", "rounding"}, found
    rows = int(found.note.partition(f" of {_M} rows")[0])
    assert len(found.judgements) == (3 if backward else 1)
    assert ROWS <= rows < 2 * ROWS, "of healthy rows few are off by more than their elements may be"
    assert found.judgements[0].count == rows * (_K if backward else _N)
    assert set(outcomes(check(case, backward, whole=True))) <= {"exact", "rounding"}


def test_rows_under_autocast_are_those_of_16_bits() -> None:
    case = linear(torch.bfloat16, torch.float32)
    case = replace(case, args=(case.args[0].float(), *case.args[1:]))
    for backward in (False, True):
        found = check(case, backward)
        assert "rows exactly" in found.note
        assert "bug" not in outcomes(found)


@pytest.mark.parametrize(("index", "at"), [(0, (2, 77, 101)), (1, (380, 13)), (2, (9,))])
def test_one_wrong_element_of_a_gradient_is_found_where_it_lies(index: int, at: tuple[int, ...]) -> None:
    def spoil(y: Tensor) -> Tensor:
        y = y.clone()
        y[at] += 1
        return y

    found = check(with_result(linear(), index, spoil, True), True)
    assert outcomes(found) == ["bug" if i == index else "rounding" for i in range(3)]
    assert found.judgements[index].at == at


@pytest.mark.parametrize("call", ["Functional.linear", "Torch.matmul", "Torch.mm", "Torch.addmm"])
@pytest.mark.parametrize("row", [0, 1, 500, _M - 1])
def test_one_wrong_element_of_a_result_is_found_where_it_lies(call: str, row: int) -> None:
    torch.manual_seed(row)
    x, w, b = torch.randn(_M, _K), torch.randn(_K, _N), torch.randn(_N)
    args = {"Functional.linear": (x, w.mT.contiguous(), b), "Torch.addmm": (b, x, w)}.get(call, (x, w))
    y = x @ w + b if len(args) == 3 else x @ w
    assert check(Case(call, args, {}, [y])).worst.outcome in ("exact", "rounding")
    largest = float(x[row].norm() * w[:, 321].norm()) * 2.0**-24
    for times, outcome in ((80, "suspicious"), (4000, "bug")):  # the bound is √K times as large as that of norms, at most
        spoiled = y.clone()
        spoiled[row, 321] += times * largest
        found = check(Case(call, args, {}, [spoiled]))
        assert (found.worst.outcome, found.worst.at) == (outcome, (row, 321))
        assert "rows exactly" in found.note


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x, w, b: F.linear(x[..., :-1], w[:, :-1], b), id="the last term lost"),
        pytest.param(lambda x, w, b: F.linear(x.bfloat16().float(), w, b), id="inputs in bfloat16"),
        pytest.param(lambda x, w, b: F.linear(x, w), id="bias lost"),
        pytest.param(
            lambda x, w, b: torch.cat([F.linear(x, w, b)[:, :-1], F.linear(x, w, b)[:, -1:] * 0], 1), id="last rows 0"
        ),
        pytest.param(lambda x, w, b: F.linear(x, w, b) * torch.nan, id="NaN"),
    ],
)
def test_faults_of_many_rows_are_found(wrong: Callable[..., Tensor]) -> None:
    case = linear()
    assert check(replace(case, outputs=[wrong(*case.args)])).worst.outcome == "bug"


def test_a_lost_row_of_a_gradient_of_weights_is_found() -> None:
    def spoil(y: Tensor) -> Tensor:
        return torch.cat([y[:-1], torch.zeros_like(y[-1:])])

    assert check(with_result(linear(), 1, spoil, True), True).worst.outcome == "bug"


def test_tf32_is_a_mode_as_it_is_for_small_products() -> None:
    case = linear()
    case = replace(case, args=(*case.args[:2], torch.zeros(_N)))
    coarse = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in case.args[:2]]
    found = check(replace(case, outputs=[F.linear(coarse[0], coarse[1], case.args[2])])).worst
    assert (found.outcome, "TF32" in found.reason) == ("mode", True)


@pytest.mark.parametrize("more", [0, 1])
def test_products_below_the_limit_are_judged_whole(as_large_as_it_says: int, more: int) -> None:
    columns = as_large_as_it_says // (1024 * 512) - 1 + more
    x, w = torch.randn(1024, 512), torch.randn(512, columns)
    found = check(Case("Torch.matmul", (x, w), {}, [x @ w]))
    assert (found.worst.count == 1024 * columns, bool(found.note)) == ((False, True) if more else (True, False))
