"""Verdicts on float64 operators, whose references are rounded like they are."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

import trainprobe
from trainprobe.cli import main
from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check

Tensor = torch.Tensor


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SYSTEM = values(6, 6) + 3 * torch.eye(6, dtype=torch.float64)
SQUARE = SYSTEM @ SYSTEM.mT


def recorded(call: Callable[..., Tensor], *given: Any, wrong: Callable[..., Tensor] | None = None, **named: Any) -> Any:
    """Return the worst judgements, forward and backward, of a call of float64, or of what a wrong kernel makes of it."""
    args = [t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
    y = (wrong or call)(*args, **named)
    torch.manual_seed(7)
    g = torch.randn_like(y)
    found = iter(torch.autograd.grad(y, [a for a in args if isinstance(a, Tensor) and a.requires_grad], g))
    tensors = [a for a in args if isinstance(a, Tensor)]
    results = [next(found) if t.requires_grad else None for t in tensors]
    name = f"Functional.{call.__name__}" if hasattr(F, call.__name__) else f"Torch.{call.__name__}"
    case = Case(name, given, named, [y.detach()], [g], results, [t.requires_grad for t in tensors], of_inputs=True)
    return check(case).worst, check(case, backward=True).worst


def _in_single(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **named: call(
        *[a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args], **named
    ).double()


def _without_a_term(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], x[:, -1:] * (1 - 1e-12)], 1) @ y


def _by_powers(x: Tensor) -> Tensor:
    total = torch.ones_like(x)
    for n in range(6, 0, -1):
        total = 1 + total * x / n
    return total


def _newton(a: Tensor, steps: int) -> Tensor:
    x = a.mT / (a.abs().sum(0).max() * a.abs().sum(1).max())
    for _ in range(2 * steps):
        x = x @ (2 * torch.eye(len(a), dtype=torch.float64) - a @ x)
    return x


WRONG: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any], Callable[..., Tensor]]] = {
    "matmul summed in float32": (torch.matmul, (values(32, 64), values(64, 16)), {}, _in_single(torch.matmul)),
    "matmul, a term off by 1e-12": (torch.matmul, (values(32, 64), values(64, 16)), {}, _without_a_term),
    "linear, bias rounded to float32": (
        F.linear,
        (values(8, 16), values(4, 16, seed=1), values(4, seed=2)),
        {},
        lambda x, w, b: F.linear(x, w, b.float().double()),
    ),
    "layer_norm, eps 1.001e-5": (F.layer_norm, (values(8, 64), (64,)), {}, lambda x, s: F.layer_norm(x, s, eps=1.001e-5)),
    "layer_norm, eps as float32 has it": (
        F.layer_norm,
        (values(8, 64) * 1e-2, (64,)),
        {},
        lambda x, s: F.layer_norm(x, s, eps=float(torch.tensor(1e-5))),
    ),
    "rms_norm in float32": (F.rms_norm, (values(8, 64), (64,)), {"eps": 1e-6}, _in_single(F.rms_norm)),
    "softmax, exponential in float32": (
        F.softmax,
        (values(8, 32), -1),
        {},
        lambda x, d: (x - x.amax(d, True)).exp().float().double() / (x - x.amax(d, True)).exp().sum(d, True),
    ),
    "log_softmax in float32": (F.log_softmax, (values(8, 32), -1), {}, _in_single(F.log_softmax)),
    "gelu by 1.702": (F.gelu, (values(400),), {}, lambda x: x * torch.sigmoid(1.702 * x)),
    "gelu, √½ as float32 has it": (
        F.gelu,
        (values(400),),
        {},
        lambda x: 0.5 * x * (1 + torch.erf(x * float(torch.tensor(0.5).sqrt()))),
    ),
    "silu in float32": (F.silu, (values(400),), {}, _in_single(F.silu)),
    "conv2d, weights off by 1e-11": (
        F.conv2d,
        (values(2, 3, 6, 6), values(4, 3, 3, 3, seed=1)),
        {},
        lambda x, w: F.conv2d(x, w * torch.linspace(1 - 1e-11, 1, 108, dtype=torch.float64).view_as(w)),
    ),
    "attention, scale as float32 has it": (
        F.scaled_dot_product_attention,
        (values(2, 6, 7), values(2, 6, 7, seed=1), values(2, 6, 7, seed=2)),
        {},
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=float(torch.tensor(7.0).rsqrt())),
    ),
    "cross_entropy in float32": (F.cross_entropy, (values(16, 10), torch.arange(16) % 10), {}, _in_single(F.cross_entropy)),
    "sum in float32": (torch.sum, (values(3, 900), -1), {}, lambda x, d: x.float().sum(d).double()),
    "cumsum in float32": (torch.cumsum, (values(3, 90), -1), {}, _in_single(torch.cumsum)),
    "exp, a polynomial of 8 digits": (
        torch.exp,
        (values(300) * 0.1,),
        {},
        _by_powers,
    ),
    "conv_transpose2d, weights off by 1e-11": (
        F.conv_transpose2d,
        (values(2, 4, 5, 5), values(4, 3, 3, 3, seed=1), values(3, seed=2), 2, 1, 1),
        {},
        lambda x, w, *rest: F.conv_transpose2d(x, w * torch.linspace(1 - 1e-11, 1, 108, dtype=torch.float64).view_as(w), *rest),
    ),
    "conv1d of one image in float32": (F.conv1d, (values(3, 9), values(4, 3, 3, seed=1)), {}, _in_single(F.conv1d)),
    "avg_pool2d, the last window counted whole": (
        F.avg_pool2d,
        (values(1, 2, 6, 6), 3, 2, 0, True),
        {},
        lambda x, *rest: F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2, 0),
    ),
    "adaptive_avg_pool2d in float32": (
        F.adaptive_avg_pool2d,
        (values(1, 2, 7, 7), (3, 3)),
        {},
        _in_single(F.adaptive_avg_pool2d),
    ),
    "bilinear with a float32 weight": (
        F.bilinear,
        (values(4, 3), values(4, 5, seed=1), values(2, 3, 5, seed=2)),
        {},
        lambda x, y, w: F.bilinear(x, y, w.float().double()),
    ),
    "solve in float32": (torch.linalg.solve, (SYSTEM, values(6, 2, seed=1)), {}, _in_single(torch.linalg.solve)),
    "solve, a right side off by 1e-11": (
        torch.linalg.solve,
        (SYSTEM, values(6, 2, seed=1)),
        {},
        lambda a, b: torch.linalg.solve(a, b * torch.linspace(1, 1 + 1e-11, 12, dtype=torch.float64).view_as(b)),
    ),
    "inverse after two steps of Newton": (torch.linalg.inv, (SYSTEM,), {}, lambda a: _newton(a, 4)),
    "cholesky in float32": (torch.linalg.cholesky, (SQUARE,), {}, _in_single(torch.linalg.cholesky)),
    "solve_triangular, the unit diagonal taken": (
        torch.linalg.solve_triangular,
        (SYSTEM.tril(), values(6, 2, seed=1)),
        {"upper": False},
        lambda a, b, upper: torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=True),
    ),
    "det in float32": (torch.linalg.det, (SYSTEM,), {}, _in_single(torch.linalg.det)),
    "det of a matrix by columns in float32": (torch.linalg.det, (SYSTEM.mT,), {}, _in_single(torch.linalg.det)),
    "logdet in float32": (torch.logdet, (SQUARE,), {}, _in_single(torch.logdet)),
    "lgamma by Stirling's first terms": (
        torch.lgamma,
        (values(50).abs() + 8,),
        {},
        lambda x: (x - 0.5) * x.log() - x + 0.9189385332046727 + 1 / (12 * x) - 1 / (360 * x**3),
    ),
    "erfinv in float32": (torch.erfinv, (values(50).tanh(),), {}, _in_single(torch.erfinv)),
    "asinh without care near 0": (torch.asinh, (values(50) * 1e-6,), {}, lambda x: (x + (x * x + 1).sqrt()).log()),
    "atan2 in float32": (torch.atan2, (values(50), values(50, seed=1)), {}, _in_single(torch.atan2)),
    "logcumsumexp in float32": (torch.logcumsumexp, (values(3, 40), -1), {}, _in_single(torch.logcumsumexp)),
    "cdist by products, which cancel": (
        torch.cdist,
        (values(9, 4) * 1e-5 + 1, values(7, 4, seed=1) * 1e-5 + 1),
        {"compute_mode": "donot_use_mm_for_euclid_dist"},
        lambda x, y, compute_mode: (x.square().sum(-1, True) + y.square().sum(-1) - 2 * x @ y.mT).clamp_min(0).sqrt(),
    ),
    "std with n for n − 1": (torch.std, (values(3, 900), -1), {}, lambda x, d: x.std(d, correction=0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_of_float64_operators_are_found(name: str) -> None:
    call, given, named, wrong = WRONG[name]
    forward, _ = recorded(call, *given, wrong=wrong, **named)
    assert forward.outcome == "bug", forward
    for right in recorded(call, *given, **named):
        assert right.outcome in ("exact", "rounding") or "torch's own float64 kernel" in right.reason, right


def _gradient(call: Callable[..., Tensor], given: tuple[Any, ...], wrong: Callable[..., Tensor], index: int) -> str:
    """Return the verdict on a gradient. wrong: takes the gradient of the result and all arguments."""
    args = [t.clone().requires_grad_() if isinstance(t, Tensor) else t for t in given]
    y = call(*args)
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7))
    leaves = [a for a in args if isinstance(a, Tensor)]
    results = [*torch.autograd.grad(y, leaves, g)]
    results[index] = wrong(g, *given)
    name = f"Functional.{call.__name__}" if hasattr(F, call.__name__) else f"Torch.{call.__name__}"
    case = Case(name, given, {}, [y.detach()], [g], results, [True] * len(leaves), of_inputs=True)
    judged = check(case, backward=True).judgements
    assert all(j.outcome in ("exact", "rounding", "not checked") for i, j in enumerate(judged) if i != index)
    return judged[index].outcome


def _of_softmax(g: Tensor, x: Tensor, dim: int) -> Tensor:
    y = x.softmax(dim)
    return y * (g - (y * g).float().sum(dim, True).double())


def _of_layer_norm(g: Tensor, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    scale = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return (g - g.mean(-1, True)) * scale


def _of_whole_windows(g: Tensor, x: Tensor, *_: Any) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2), x, g)[0]


GRADIENTS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Callable[..., Tensor], int]] = {
    "matmul, left one in float32": (
        torch.matmul,
        (values(8, 64), values(64, 16)),
        lambda g, x, y: (g.float() @ y.float().mT).double(),
        0,
    ),
    "matmul, right one without a row": (torch.matmul, (values(8, 64), values(64, 16)), lambda g, x, y: x[1:].mT @ g[1:], 1),
    "linear, bias summed in float32": (
        F.linear,
        (values(64, 16), values(4, 16, seed=1), values(4, seed=2)),
        lambda g, *_: g.float().sum(0).double(),
        2,
    ),
    "conv2d of one image, weights in float32": (
        F.conv2d,
        (values(3, 6, 6), values(4, 3, 3, 3, seed=1)),
        lambda g, x, w: conv2d_weight(x.float()[None], w.shape, g.float()[None]).double(),
        1,
    ),
    "conv_transpose1d, the input's": (
        F.conv_transpose1d,
        (values(2, 4, 9), values(4, 3, 3, seed=1)),
        lambda g, x, w: F.conv1d(g.float(), w.float()).double(),
        0,
    ),
    "bilinear interpolation, in float32": (
        F.upsample_bilinear,
        (values(1, 2, 5, 5), (9, 9)),
        lambda g, x, size: torch.ops.aten.upsample_bilinear2d_backward(g.float(), size, x.shape, True).double(),
        0,
    ),
    "nearest interpolation, without a column": (
        F.upsample_nearest,
        (values(1, 2, 5, 5), (10, 10)),
        lambda g, x, size: (
            torch.cat([g[..., :-2], g[..., -1:].expand(1, 2, 10, 2) * 0.5], -1).unfold(2, 2, 2).unfold(3, 2, 2).sum((-1, -2))
        ),
        0,
    ),
    "avg_pool2d, its windows divided by 9": (
        F.avg_pool2d,
        (values(1, 2, 6, 6), 3, 2, 0, True),
        _of_whole_windows,
        0,
    ),
    "solve, the matrix's without the minus": (
        torch.linalg.solve,
        (SYSTEM, values(6, 2, seed=1)),
        lambda g, a, b: torch.linalg.solve(a.mT, g) @ torch.linalg.solve(a, b).mT,
        0,
    ),
    "inverse in float32": (
        torch.linalg.inv,
        (SYSTEM,),
        lambda g, a: -(a.float().inverse().mT @ g.float() @ a.float().inverse().mT).double(),
        0,
    ),
    "lgamma by the logarithm": (torch.lgamma, (values(50).abs() + 8,), lambda g, x: g * (x.log() - 0.5 / x), 0),
    "softmax, inner sum in float32": (F.softmax, (values(8, 32), -1), _of_softmax, 0),
    "layer_norm without its second term": (F.layer_norm, (values(8, 64), (64,)), _of_layer_norm, 0),
    "silu without its second term": (F.silu, (values(400),), lambda g, x: g * x.sigmoid(), 0),
    "gelu by the tanh's slope": (
        F.gelu,
        (values(400),),
        lambda g, x: g * torch.func.vmap(torch.func.grad(lambda v: F.gelu(v, approximate="tanh")))(x),
        0,
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_faults_of_float64_gradients_are_found(name: str) -> None:
    assert _gradient(*GRADIENTS[name]) == "bug"


def _backwards(x: Tensor, y: Tensor) -> Tensor:
    return x.flip(-1) @ y.flip(0)


def _one_by_one(x: Tensor, y: Tensor) -> Tensor:
    total = x[:, :1] * y[:1]
    for k in range(1, x.shape[1]):
        total = torch.addcmul(total, x[:, k : k + 1], y[k : k + 1])  # fused or not, as the compiler has it
    return total


RIGHT: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Callable[..., Tensor]]] = {
    "matmul from the other end": (torch.matmul, (values(32, 512), values(512, 16)), _backwards),
    "matmul term by term": (torch.matmul, (values(32, 512), values(512, 16)), _one_by_one),
    "matmul of halves": (
        torch.matmul,
        (values(32, 512), values(512, 16)),
        lambda x, y: x[:, ::2] @ y[::2] + x[:, 1::2] @ y[1::2],
    ),
    "sum, running": (torch.sum, (values(3, 900), -1), lambda x, d: x.cumsum(d)[:, -1]),
    "softmax without its maximum": (F.softmax, (values(8, 32), -1), lambda x, d: x.exp() / x.exp().sum(d, True)),
    "softmax by base 2": (
        F.softmax,
        (values(8, 32), -1),
        lambda x, d: torch.exp2((x - x.amax(d, True)) * 1.4426950408889634).div(
            torch.exp2((x - x.amax(d, True)) * 1.4426950408889634).sum(d, True)
        ),
    ),
    "layer_norm by E x² − (E x)²": (
        F.layer_norm,
        (values(8, 64), (64,)),
        lambda x, s: (x - x.mean(-1, True)) / (x.square().mean(-1, True) - x.mean(-1, True).square() + 1e-5).sqrt(),
    ),
    "gelu by erfc": (F.gelu, (values(400),), lambda x: 0.5 * x * torch.erfc(-x * 0.5**0.5)),
    "silu by tanh": (F.silu, (values(400),), lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x))),
    "attention written out": (
        F.scaled_dot_product_attention,
        (values(2, 6, 7), values(2, 6, 7, seed=1), values(2, 6, 7, seed=2)),
        lambda q, k, v: ((q * 7**-0.5) @ k.mT).softmax(-1) @ v,
    ),
    "conv2d by its windows": (
        F.conv2d,
        (values(2, 3, 6, 6), values(4, 3, 3, 3, seed=1)),
        lambda x, w: (w.flatten(1) @ F.unfold(x, 3)).view(2, 4, 4, 4),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_float64_kernels_that_differ_from_torchs_are_right(name: str) -> None:
    call, given, other = RIGHT[name]
    forward, backward = recorded(call, *given, wrong=other)
    assert forward.outcome in ("exact", "rounding"), forward
    assert backward.outcome in ("exact", "rounding") or "the bits of torch's own" in backward.reason, backward


@pytest.mark.parametrize("zeros", [1, 30])
def test_a_zero_hides_no_other_element(zeros: int) -> None:
    x, y = values(60), values(60, seed=1)
    x[:zeros] = 0
    assert check(Case("Torch.mul", (x, y), {}, [x * y])).worst.outcome == "exact"
    wrong = x * y
    wrong[-1] *= 1 + 1e-9
    found = check(Case("Torch.mul", (x, y), {}, [wrong])).worst
    assert (found.outcome, found.at) == ("bug", (59,))
    wrong = x * y
    wrong[0] = 1e-300
    assert check(Case("Torch.mul", (x, y), {}, [wrong])).worst.outcome == "bug"


def test_agreement_with_torchs_own_float64_kernel_is_no_proof() -> None:
    x = values(50).abs()
    y = torch.special.bessel_j0(x)
    found = check(Case("Torch.special_bessel_j0", (x,), {}, [y])).worst
    assert found.outcome == "not checked"
    assert found.reason == "it has the bits of torch's own float64 kernel, and no formula says what is right"
    assert check(Case("Torch.special_bessel_j0", (x,), {}, [y * (1 + 1e-9)])).worst.outcome == "bug"
    assert check(Case("Torch.relu", (x,), {}, [torch.relu(x)])).worst.outcome == "exact"


def test_the_replay_of_a_float64_call_prints_the_same_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()).double()
    settings: dict[str, Any] = {"level": "mix", "task": "tensor", "output": str(tmp_path / "dump"), "console": False}
    x = values(16, 8)
    with trainprobe.watch(model, **settings) as probe, probe.step():
        torch.special.spherical_bessel_j0(model(x).detach())
        model(x).sum().backward()
        torch.mul(x, x)
    capsys.readouterr()
    for entry, said in (
        ("Functional.gelu.0.forward", "rounding"),
        ("Functional.linear.0.forward", "rounding"),
        ("Torch.special_spherical_bessel_j0.0.forward", "not checked"),
        ("Torch.mul.0.forward", "exact"),
    ):
        code = main(["op-check", str(tmp_path / "dump"), "--op", entry, "--replay", str(tmp_path / "out"), "-q"])
        assert code == (3 if said == "not checked" else 0), capsys.readouterr().out
        script = tmp_path / "out" / f"{entry.replace('.', '_')}.py"
        monkeypatch.setattr(sys, "argv", [str(script)])
        runpy.run_path(str(script))
        ran = capsys.readouterr().out
        same = ("exact", "rounding") if said == "rounding" else (said,)
        assert ran.partition("recorded, result 0: ")[2].startswith(same), ran
