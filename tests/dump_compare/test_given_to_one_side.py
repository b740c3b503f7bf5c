"""A tensor that one side alone gives to a call: the call that gets it is named, and no other fault is laid on it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.cli import main

POSITIONS = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])


class Inner(nn.Module):
    """Adds positions, and leaves out what is masked."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.w, self.p, self.last = change, nn.Linear(8, 8), nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, pos: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.p(torch.arange(4)[None] if pos is None else pos)
        x = self.w(x if mask is None else x * mask)
        return self.last(x * 1.5 if self.change == "between" else x)


class Outer(nn.Module):
    def __init__(self, change: str, inner_only: bool) -> None:
        super().__init__()
        self.inner, self.inner_only = Inner(change), inner_only

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        given = {"pos": POSITIONS} if self.inner_only else given
        return self.inner(x, **given).pow(2).mean()


def trained(folder, change: str = "", level: str = "mix", inner_only: bool = False, **given: Tensor) -> str:
    torch.manual_seed(0)
    model = Outer(change, inner_only)
    if change == "weight":
        with torch.no_grad():
            model.inner.last.weight.mul_(1.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainprobe.watch(model, optimizer, level=level, step=[0], summary="both", output=folder) as probe, probe.step():
        model(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)), **given).backward()
        optimizer.step()
    return str(folder)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("sides", ["AB", "BA"])
def test_the_call_that_gets_it_is_named(level, sides, tmp_path, capsys):
    """Case p05."""
    folders = [trained(tmp_path / "a", level=level, pos=POSITIONS), trained(tmp_path / "b", level=level)]
    assert main(["dump-compare", *(folders if sides == "AB" else folders[::-1])]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        f"first difference is at Module.inner.Inner.forward.0 (step 0, micro-batch 0, rank 0): pos is given in {sides[0]} alone"
        in first
    )
    assert "Module.root.Outer.forward.0, which it runs within, is given it there too" in first


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_module_around_it_that_is_given_the_same_is_not_named(level, tmp_path, capsys):
    folders = [trained(tmp_path / "a", level=level, inner_only=True), trained(tmp_path / "b", level=level)]
    assert main(["dump-compare", *folders]) == 2
    said = capsys.readouterr().out
    assert "difference is at Module.inner.Inner.forward.0 (step 0, micro-batch 0, rank 0): pos is given in A alone" in said
    assert "it arises there" not in said and "too" not in said.splitlines()[0]


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_mask_that_changes_nothing_is_no_difference_of_the_modules(level, tmp_path, capsys):
    """The operator that applies it runs on one side alone, and so has no partner where operators are recorded."""
    folders = [trained(tmp_path / "a", level=level, mask=torch.ones(2, 4, 1)), trained(tmp_path / "b", level=level)]
    assert main(["dump-compare", *folders]) == (3 if level == "mix" else 0)
    assert "part" not in capsys.readouterr().out.splitlines()[0].replace("parts of one", "").replace("partner", "")


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize(("change", "place"), [("weight", "Module.inner.last.Linear"), ("between", "Module.inner.last.Linear")])
def test_another_fault_beside_a_mask_that_changes_nothing_is_told(change, place, level, tmp_path, capsys):
    folders = [trained(tmp_path / "a", level=level, mask=torch.ones(2, 4, 1)), trained(tmp_path / "b", change, level)]
    assert main(["dump-compare", *folders]) == 2
    said = capsys.readouterr().out
    assert place in (said.splitlines()[0] if change == "weight" else said)
    assert change == "weight" or re.search("the first that changes within it is at .*: input.0", said)
