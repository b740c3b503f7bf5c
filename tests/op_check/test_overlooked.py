"""Faults that passed once, each with its healthy twin; where gradients come from; what a report counts and lists."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainprobe
from benchmarks.op_check import overlooked
from trainprobe.op_check.cases import Case, flat
from trainprobe.op_check.check import check

ZEROS = torch.tensor([0.0, -0.0, 3.0, -2.0, -0.0, 0.0])


@pytest.mark.parametrize("name", overlooked.FAULTS)
def test_a_fault_is_found(name: str) -> None:
    case, wants = overlooked.FAULTS[name]
    assert overlooked.judged(case).worst.outcome in wants


@pytest.mark.parametrize("name", overlooked.TWINS)
def test_its_healthy_twin_is_not_accused(name: str) -> None:
    case, fine = overlooked.TWINS[name]
    assert overlooked.judged(case).worst.outcome in fine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torchs_own_signs_of_zeros_are_right(dtype: torch.dtype) -> None:
    x = ZEROS.to(dtype)
    y, mask = x.flip(0), torch.tensor([True, False, True, False, True, True])
    calls: list[tuple[str, Any, tuple[Any, ...]]] = [
        *((f"Torch.{name}", getattr(torch, name), (x,)) for name in ("neg", "abs", "sqrt", "ceil", "floor", "round", "trunc")),
        *((f"Torch.{name}", getattr(torch, name), (x, y)) for name in ("mul", "div", "copysign")),
        *((f"Torch.{name}", getattr(torch, name), ([x, y],)) for name in ("cat", "stack")),
        ("Torch.where", torch.where, (mask, x, y)),
        ("Tensor.mul", torch.mul, (x, -1.0)),
        ("Tensor.mul", torch.mul, (x, 0)),
        ("Tensor.to", torch.Tensor.to, (x, torch.float32)),
        ("Tensor.to", torch.Tensor.to, (x, torch.bfloat16)),
        ("Torch.index_select", torch.index_select, (x, 0, torch.tensor([1, 0, 4]))),
        ("Torch.masked_select", torch.masked_select, (x, mask)),
        ("Torch.roll", torch.roll, (x, 1)),
    ]
    for name, function, args in calls:
        case = Case(name, args, {}, [*flat([function(*args)])])
        assert check(case).worst.outcome in ("exact", "rounding", "not checked"), (name, check(case).worst)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_backward_behind_requires_grad_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    """Case c09; the next test has its checkpoint."""
    with trainprobe.CompareWithCPU():
        x = torch.randn(64).detach().requires_grad_()
        F.gelu(x).sum().backward()
        y = torch.randn(4, requires_grad=True)
        torch.autograd.grad(y.square().sum(), y)
    found = lines(capsys)
    assert any("gelu.0 (backward) succeeds" in line for line in found)
    assert any("square.0 (backward) succeeds" in line for line in found)
    assert not any("WARNING" in line or "Torch.grad" in line for line in found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_backward_is_tested(reentrant: bool, capsys: pytest.CaptureFixture[str]) -> None:
    w, model = torch.randn(8, 8, requires_grad=True), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with trainprobe.CompareWithCPU(model=model):
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(lambda a: torch.tanh(a @ w), x, use_reentrant=reentrant).sum().backward()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    found = lines(capsys)
    for name in ("tanh", "matmul", "linear", "gelu"):
        assert any(re.search(rf"{name}\.\d \(backward\) succeeds", line) for line in found), name
    assert not any("WARNING" in line for line in found)


def test_a_dump_without_the_forward_says_that_its_backward_was_not_judged(tmp_path: Path) -> None:
    from trainprobe.op_check.conclusion import conclude
    from trainprobe.op_check.dump import check_dump, rank_folders

    w, layer = torch.randn(8, 8, requires_grad=True), nn.Linear(8, 8)
    with (
        trainprobe.watch(
            layer,
            torch.optim.SGD(layer.parameters(), 0.1),
            level="mix",
            task="tensor",
            step=[0],
            output=tmp_path,
            console=False,
        ) as probe,
        probe.step(),
    ):
        checkpoint(
            lambda a: layer(torch.tanh(a @ w)), torch.randn(4, 8, requires_grad=True), use_reentrant=True
        ).sum().backward()
    found = conclude(check_dump(rank_folders(tmp_path)))
    assert found.code == 3
    assert any("recomputed" in detail for detail in found.details)


def test_a_gradient_that_is_differentiated_is_no_bug(tmp_path: Path) -> None:
    """The bias has its gradient from both passes, and the module shows what the first was given."""
    from trainprobe.op_check.conclusion import conclude
    from trainprobe.op_check.dump import check_dump, rank_folders

    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    plan: dict[str, Any] = {"level": "mix", "task": "tensor", "step": [0], "output": tmp_path, "console": False}
    with trainprobe.watch(layer, torch.optim.SGD(layer.parameters(), 0.1), **plan) as probe, probe.step():
        x = torch.randn(4, 8, requires_grad=True)
        y = F.gelu(layer(x))
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.mean() + slope.square().mean()).backward()
    assert "is a bug" not in conclude(check_dump(rank_folders(tmp_path))).sentence


def test_an_error_lists_the_twenty_worst_elements(capsys: pytest.CaptureFixture[str]) -> None:
    with trainprobe.CompareWithCPU(atol=0.0, rtol=0.0):  # so narrow that rounding is an error
        F.gelu(torch.randn(400))
    found = lines(capsys)
    start = next(i for i, line in enumerate(found) if line.startswith("[ERROR]") and "gelu" in line)
    block = [
        line
        for line in found[start + 1 : start + 21]
        if re.fullmatch(r"    Element at index \(\d+,\) is not close: \S+ vs \S+", line)
    ]
    assert len(block) == 20
    apart = [abs(float(a) - float(b)) for a, b in (re.findall(r": (\S+) vs (\S+)", line)[0] for line in block)]
    assert all(a >= b - 3e-8 for a, b in pairwise(apart))  # they are printed with nine digits


def test_the_numbers_of_a_report_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainprobe.cli import main

    layer, x = nn.Linear(8, 8), torch.ones(2, 8)
    with (
        trainprobe.watch(
            layer, torch.optim.SGD(layer.parameters(), 0.1), level="L1", task="tensor", step=[0], output=tmp_path, console=False
        ) as probe,
        probe.step(),
    ):
        for _ in range(3):
            torch.tanh(layer(x))
        layer(x).sum().backward()
    assert main(["op-check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    total, counts = re.findall(r"(\d+) calls judged \((.*?)\)", said)[0]
    assert int(total) == sum(int(n) for n in re.findall(r"(\d+) [a-z]+", counts))
    rows = [line for line in said.splitlines() if re.search(r"(forward|backward) +\d", line)]
    assert sum(int(re.findall(r"(?:forward|backward) +(\d+)", row)[0]) for row in rows) == int(total)
    for row in rows:
        calls, verdicts = re.findall(r"(?:forward|backward) +(\d+)", row)[0], row.rstrip().rpartition("  ")[2]
        assert int(calls) == sum(int(n) for n in re.findall(r"(\d+) [a-z]+", verdicts))
    assert all((" of 4 " in row) == ("rounding" in row) for row in rows), "each distance stands beside its limit"


def _maximum(overwrites: bool) -> Any:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.where(a >= b, a, b)
        if overwrites:
            b.numpy()[3] = 7.0  # past the version counter, as a kernel with a wrong address does
        return out

    return kernel


@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("overwrites", [True, False])
def test_an_argument_that_an_operator_overwrites_is_a_bug(overwrites: bool, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.randn(8), torch.randn(8)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("maximum", _maximum(overwrites), "CPU")
        with trainprobe.CompareWithCPU():
            torch.maximum(a, b)
            torch.tanh(b)
    found = lines(capsys)
    assert (
        any("maximum.0 (forward) fails" in line and "overwrote its argument 1: 1 of 8" in line for line in found) == overwrites
    )
    assert any("tanh.0 (forward) succeeds" in line for line in found)
    assert sum("[ERROR]" in line for line in found) == overwrites


def _damaged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.where(a >= b, a, b)
    if b.numel():
        b.numpy()[(-1,) * b.dim()] = 1
    return out


@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize(
    "b",
    [
        torch.zeros(300, 400),
        torch.zeros(400, 300).t(),
        torch.zeros(8, 8)[:, 3:],
        torch.zeros(5, 1).expand(5, 4),
        torch.zeros(0),
    ],
    ids=["large", "transposed", "cut", "expanded", "empty"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_one_changed_element_is_found_however_it_lies_in_memory(
    b: torch.Tensor, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    b = torch.empty_strided(b.shape, b.stride(), dtype=dtype).zero_()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("maximum", _damaged, "CPU")
        with trainprobe.CompareWithCPU():
            torch.maximum(torch.ones_like(b), b)
    found = [line for line in lines(capsys) if "overwrote its argument 1" in line]
    assert bool(found) == bool(b.numel())


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_a_call_behind_one_that_overwrites_memory_is_not_accused_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.randn(8), torch.randn(8)
    alias = b.view(2, 4)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("maximum", _maximum(True), "CPU")
        with trainprobe.CompareWithCPU():
            torch.tanh(alias)
            torch.maximum(a, b)
            torch.exp(alias)
    found = lines(capsys)
    assert [line.split()[4] for line in found if "[ERROR]" in line] == ["Torch.maximum.0"], found
    assert any("exp.0 (forward) succeeds" in line for line in found)


def test_what_no_call_overwrites_is_stored_once(tmp_path: Path) -> None:
    stored: list[str] = []
    probe = trainprobe.Probe(level="off", op_check=True, console=False, output=tmp_path)
    held = probe.program("op_check").held
    keep = held.tensor
    held.tensor = lambda step, saved: stored.append(saved.key) or keep(step, saved)
    x = torch.randn(3, 6)
    with probe:
        probe.begin_step(0)
        torch.exp(torch.tanh(x) * x)
        probe.end_step()
    assert stored == [
        *("Torch.tanh.0.forward.input.0", "Torch.tanh.0.forward.output"),
        *("Tensor.mul.0.forward.output", "Torch.exp.0.forward.output"),
    ]


def test_what_programs_write_themselves_is_no_overwritten_argument(capsys: pytest.CaptureFixture[str]) -> None:
    x, table, norm = torch.randn(6, 6), torch.randn(9, 6) * 5, nn.BatchNorm1d(6)
    model = nn.Linear(6, 6)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD(model.parameters(), 0.1, foreach=True)]
    with trainprobe.CompareWithCPU():
        x.mul_(x)
        x[:, 3:].sub_(x[:, :3])
        x.copy_(x.t().clone())
        F.relu(x, True)
        F.dropout(x, 0.5, True, True)
        F.embedding(torch.tensor([1, 2]), table, max_norm=1.0)
        norm(x)
        torch.add(x, x, out=table[:6])
        x.data.mul_(2.0)
        torch.tanh(x)
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
    assert not [line for line in lines(capsys) if "overwrote" in line or "[ERROR]" in line]


def test_a_weight_that_two_layers_share_is_still_one(capsys: pytest.CaptureFixture[str]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.table(x)))

    model = Tied()
    with trainprobe.CompareWithCPU(model=model):
        model(torch.tensor([1, 2, 3])).square().sum().backward()
    assert not [line for line in lines(capsys) if "[ERROR]" in line]
