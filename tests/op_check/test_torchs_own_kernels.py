"""Kernels of torch that are right and look wrong to a judge that knows too little of how they work: none is called a bug."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainprobe
from trainprobe.op_check.cases import Case, flat
from trainprobe.op_check.check import Checked, check
from trainprobe.op_check.modes import nearest

Given = tuple[tuple[Any, ...], dict[str, Any]]


def made(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> Case:
    """Return a call as a dump of this machine would hold it, with a random gradient where its backward is wanted."""
    tensors = [*flat((args, kwargs))]
    for t in tensors if backward else ():
        t.requires_grad_(t.is_floating_point())
    out = [*flat(run(*args, **kwargs))]
    case = Case(name, args, kwargs, [o.detach() for o in out], requires_grad=[t.requires_grad for t in tensors], function=run)
    if backward:
        gradient = torch.randn_like(out[0])
        wanted = [t for t in tensors if t.requires_grad]
        found = iter(torch.autograd.grad(out[0], wanted, gradient))
        case.gradients, case.of_inputs = [gradient], True
        case.results = [next(found) if t.requires_grad else None for t in tensors]
    return case


def sure_scores() -> Given:
    torch.manual_seed(3)
    return tuple(torch.rand(4, 4, n, 8) * 18 - 9 for n in (3, 6, 6)), {}


def nearly_sure_classes() -> Given:
    torch.manual_seed(0)
    logits = torch.randn(64, 8)
    target = torch.arange(64) % 8
    logits[torch.arange(64), target] += 12
    options = F.LinearCrossEntropyOptions(batch_chunk_size=2) if hasattr(F, "LinearCrossEntropyOptions") else None
    return (logits, torch.eye(8), target), {"reduction": "none", "options": options}


def losses_that_cancel() -> Given:
    torch.manual_seed(0)
    return (torch.rand(64, 5) * 18 - 9, torch.rand(64, 5)), {"reduction": "none", "pos_weight": torch.rand(5) * 9}


def one_element_in_a_row() -> Given:
    return (torch.tensor([-8.5], dtype=torch.bfloat16), (1,), torch.tensor([-8.5], dtype=torch.bfloat16), None, 1e-5), {}


def on_the_border_of_cells() -> Given:
    torch.manual_seed(0)
    places = torch.randint(-3, 4, (2, 6, 7, 2)) / 2.0 + torch.randint(-1, 2, (2, 6, 7, 2)) * 1e-8
    return (torch.randn(2, 3, 5, 5), places), {"mode": "bilinear", "padding_mode": "reflection", "align_corners": True}


def least_squares() -> Given:
    torch.manual_seed(5)
    a = torch.randn(60, 5, 3)
    a[..., 2] = a[..., 1] + 1e-2 * a[..., 2]
    return (a, torch.randn(60, 5, 3)), {}


RIGHT: list[tuple[str, Callable[..., Any], Callable[[], Given], bool]] = [
    ("Functional.scaled_dot_product_attention", F.scaled_dot_product_attention, sure_scores, True),
    ("Functional.binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, losses_that_cancel, False),
    ("Torch.native_layer_norm", torch.native_layer_norm, one_element_in_a_row, False),
    ("Torch.arange", torch.arange, lambda: ((0, 10000), {"dtype": torch.bfloat16}), False),
    ("Torch.linspace", torch.linspace, lambda: ((4.3, -3, 50), {}), False),
    ("Torch.histogram", torch.histogram, lambda: ((torch.tensor(-8.4784), 3), {"density": True}), False),
    (
        "Functional.batch_norm",
        F.batch_norm,
        lambda: ((torch.zeros(0), torch.zeros(0), torch.zeros(0)), {"training": False}),
        False,
    ),
    ("Functional.grid_sample", F.grid_sample, on_the_border_of_cells, True),
    ("Torch.linalg_lstsq", torch.linalg.lstsq, least_squares, False),
]
if hasattr(F, "linear_cross_entropy"):
    RIGHT.append(("Functional.linear_cross_entropy", getattr(F, "linear_cross_entropy"), nearly_sure_classes, False))  # noqa: B009


def judged(name: str, run: Callable[..., Any], given: Given, backward: bool) -> Checked:
    return check(made(name, run, *given, backward), backward)


@pytest.mark.parametrize(("name", "run", "given", "backward"), RIGHT, ids=[one[0] for one in RIGHT])
def test_a_right_kernel_is_no_bug(name: str, run: Callable[..., Any], given: Callable[[], Given], backward: bool) -> None:
    found = judged(name, run, given(), backward)
    assert found.worst.outcome in ("exact", "rounding", "unspecified"), found.worst


def test_what_was_learnt_of_them_hides_no_fault() -> None:
    def with_an_error(run: Callable[..., Any], by: float) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            first = (out[0] if isinstance(out, tuple) else out).clone(memory_format=torch.contiguous_format)
            first.view(-1)[first.abs().argmax()] *= 1 + by
            return (first, *out[1:]) if isinstance(out, tuple) else first

        return wrong

    for name, run, given, _ in RIGHT:
        if name in ("Functional.batch_norm", "Torch.native_layer_norm"):
            continue  # one number, or none
        args, kwargs = given()
        case = made(name, run, args, kwargs, False)
        case.outputs = [o.detach() for o in flat(with_an_error(run, 0.1)(*args, **kwargs))]
        assert check(case).worst.outcome in ("bug", "suspicious"), name


class Norms(nn.Module):
    """What a model under autocast hands to norms and products: 16 bits beside float32, indices that repeat, a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.channels = nn.BatchNorm1d(16)
        self.table = nn.Parameter(torch.randn(5, 16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3, padding=1))
        for norm in (self.norm, self.channels):
            nn.init.uniform_(norm.weight, 0.7, 1.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(self.norm(self.project(x))) + self.table[torch.arange(24) % 5]
        h = self.channels(self.wide(h.transpose(1, 2)).bfloat16())
        return (h * self.scale.bfloat16()).float().square().mean()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_healthy_training_under_autocast_has_no_bug(low: bool, threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)  # of several, each keeps its sums in bfloat16, and adds them up in float32
    torch.manual_seed(0)
    model = Norms()
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, Any] = {"level": "off", "output": str(tmp_path), "console": False, "op_check": {"step": [0, 1]}}
    with trainprobe.watch(model, optimizer, **settings) as probe:
        for _ in range(2):
            with probe.step():
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    loss = model(torch.randn(2, 24, 16))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    said = (tmp_path / "rank0" / "op_check.txt").read_text().splitlines()
    assert len(said) > 100
    assert [line for line in said if "[ERROR]" in line or " is suspicious" in line] == []


def test_a_gradient_that_autocast_cast_back_is_judged_all_the_same() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    out = x.bfloat16() @ weight.bfloat16().T
    gradient = torch.randn(32, 8).bfloat16()
    of_x = (gradient @ weight.bfloat16()).float()
    of_weight = (gradient.T @ x.bfloat16()).float()
    case = Case("Functional.linear", (x, weight), {}, [out], [gradient], [of_x, of_weight], [True, True], of_inputs=True)
    assert check(case, backward=True).worst.outcome in ("exact", "rounding")
    case.results = [of_x, of_weight * 1.02]
    assert check(case, backward=True).worst.outcome == "bug"


def test_sums_that_torch_itself_keeps_in_bfloat16_are_called_so() -> None:
    """On a CPU it is the sum of the rows in bfloat16, one after the other: of 512 rows hardly a digit is right."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(512, 16).bfloat16().requires_grad_()
    weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    gradient = (torch.randn(512, 16) * 1e-3).bfloat16()
    out = F.layer_norm(x, (16,), weight, bias)
    found = torch.autograd.grad(out, (x, weight, bias), gradient)
    in_turn = torch.zeros(16, dtype=torch.bfloat16)
    for row in gradient:
        in_turn = in_turn + row
    assert torch.equal(in_turn.float(), found[2])
    args = (x.detach(), (16,), weight.detach(), bias.detach())
    case = Case("Functional.layer_norm", args, {}, [out.detach()], [gradient], found, [True] * 3, of_inputs=True)
    judged = check(case, backward=True)
    assert [j.outcome for j in judged.judgements][2] == "mode"
    assert "calculates in bfloat16 inside" in judged.judgements[2].reason


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "least"), [(64, 0.003), (1024, 0.01), (12544, 0.05)])
def test_torch_alone_loses_digits_of_the_bias_gradient_of_layer_norm(rows: int, least: float, threads: int) -> None:
    """The rows of Swin and SegFormer are as many: against sums in float64 by hand, torch on a CPU is wrong by as much."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x, gradient = torch.randn(rows, 32).bfloat16(), torch.randn(rows, 32).bfloat16()
    weight, bias = torch.ones(32, requires_grad=True), torch.zeros(32, requires_grad=True)
    out = F.layer_norm(x, (32,), weight, bias)
    by_torch = torch.autograd.grad(out, bias, gradient)[0]
    by_hand = gradient.double().sum(0)
    assert least < float((by_torch.double() - by_hand).norm() / by_hand.norm())
    in_float32 = gradient.float().sum(0)
    assert float((in_float32.double() - by_hand).norm() / by_hand.norm()) < 1e-5
    args = (x, (32,), weight.detach(), bias.detach())
    case = Case("Functional.layer_norm", args, {}, [out.detach()], [gradient], (), [False, False, True], of_inputs=True)
    case.results = [None, None, in_float32]
    assert check(case, backward=True).worst.outcome in ("exact", "rounding")
    case.results = [None, None, by_torch]
    found = check(case, backward=True).worst
    assert found.outcome == ("bug" if rows > 10_000 else "mode")
    if found.outcome == "bug":
        by = " by each of 2 threads" if threads == 2 else ""
        assert f"it is, to the bit, the sum of all rows kept in bfloat16, row by row{by}" in found.reason


def test_torch_alone_keeps_a_sixth_in_float32_for_gradients_of_float64() -> None:
    """1.0f / 6.0f is 3e-8 away from a sixth: the finding on hardsigmoid's gradient is true."""
    x = torch.linspace(-2, 2, 5, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(F.hardsigmoid(x).sum(), x)
    assert float((g * 6 - 1).abs().min()) > 1e-8
    y = F.hardsigmoid(x.detach())
    case = Case("Functional.hardsigmoid", (x.detach(),), {}, [y], [torch.ones_like(y)], [g], [True], of_inputs=True)
    assert check(case, backward=True).worst.outcome == "bug"
    case.results = [torch.full_like(g, 1 / 6)]
    assert check(case, backward=True).worst.outcome in ("exact", "rounding")


class _Tf32(TorchDispatchMode):
    """Rounds what is multiplied as tensor cores do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            args = [nearest(10)(a.double()).float() if isinstance(a, torch.Tensor) else a for a in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [torch.linalg.solve, torch.linalg.inv, torch.linalg.matrix_power])
def test_the_products_in_a_backward_may_be_tf32(call: Any) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(24, 24) + 8 * torch.eye(24), torch.randn(24, 24)
    given = {torch.linalg.solve: (a, b), torch.linalg.matrix_power: (a / 8, 3)}.get(call, (a,))
    args = [g.clone().requires_grad_() if isinstance(g, torch.Tensor) else g for g in given]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    y = call(*args)
    g = torch.randn_like(y)
    for mode, outcome in ((_Tf32(), "mode"), (nullcontext(), "rounding")):
        with mode:
            results = [*torch.autograd.grad(y, tensors, g, retain_graph=True)]
        case = Case(f"Torch.{call.__name__}", given, {}, [y.detach()], [g], results, [True] * len(tensors), of_inputs=True)
        assert check(case, backward=True).worst.outcome == outcome
