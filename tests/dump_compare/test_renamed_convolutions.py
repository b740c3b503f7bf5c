"""A convolutional net of other names: all its convolutions have weights of one shape, and its norms begin alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.cli import main

CHANNELS, DEPTH = 8, 4


class Net(nn.Module):
    """names: of what holds the convolutions, the norms, the activations and the last layer."""

    def __init__(self, names: Sequence[str], alike: bool) -> None:
        super().__init__()
        convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(DEPTH))
        generator = torch.Generator().manual_seed(0)
        for conv in convs:
            whole = torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(1) if alike else generator)
            conv.weight.data.copy_(whole / 8)
        norms, acts = (
            nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(DEPTH)),
            nn.ModuleList(nn.GELU() for _ in range(DEPTH)),
        )
        head = nn.Linear(CHANNELS, 3, bias=False)
        head.weight.data.copy_(torch.randn(3, CHANNELS, generator=generator))
        for name, module in zip(names, (convs, norms, acts, head), strict=True):
            self.add_module(name, module)
        self.parts = [convs, norms, acts, head]

    def forward(self, x: Tensor) -> Tensor:
        convs, norms, acts, head = self.parts
        for conv, norm, act in zip(convs, norms, acts, strict=True):
            x = x + act(norm(conv(x)))
        return head(x.mean((2, 3)))


A, B = ("convs", "norms", "acts", "head"), ("filters", "scales", "shapes", "classes")


def train(output: Path, names: Sequence[str], alike: bool, change: Callable[[Net], object] | None = None) -> Path:
    model = Net(names, alike)
    if change is not None:
        with torch.no_grad():
            change(model)
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(3)
    with trainprobe.watch(model, optimizer, output=output, console=False, level="L0", summary="both") as probe:
        for _ in range(2):
            x, y = torch.randn(5, CHANNELS, 6, 6, generator=generator), torch.randint(3, (5,), generator=generator)
            with probe.step():
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return output


@pytest.fixture
def compared(tmp_path, capsys):
    """Return a function that gives the exit code, the first line and module of A → (module of B, evidence)."""

    def compare(alike: bool, change: Callable[[Net], object] | None = None):
        a, b = train(tmp_path / "a", A, alike), train(tmp_path / "b", B, alike, change)
        capsys.readouterr()
        code = main(["dump-compare", str(a), str(b), "--json", str(tmp_path / "all.json")])
        calls = json.loads((tmp_path / "all.json").read_text())["calls"]
        name = lambda entry: ".".join(entry.split(".")[1:-3])  # noqa: E731
        found = {
            name(call["a"]): (name(call["b"]), call["paired_by"])
            for call in calls
            if call["a"] and ".forward." in call["a"] and call["b"] and call["step"] == 0
        }
        return code, capsys.readouterr().out.splitlines()[0], found

    return compare


@pytest.mark.parametrize("alike", [False, True], ids=["weights of their own", "weights that are all the same"])
def test_convolutions_of_one_shape_find_their_partners(compared, alike):
    code, said, found = compared(alike)
    assert code == 0, said
    evidence = "order of calls and shapes" if alike else "equal weights"
    for i in range(DEPTH):
        assert found[f"convs.{i}"] == (f"filters.{i}", evidence)
        assert found[f"norms.{i}"] == (f"scales.{i}", "equal weights")  # what they have seen of the batch tells them apart
        assert found[f"acts.{i}"] == (f"shapes.{i}", "order of calls and shapes")


def other_weight(model: Net) -> None:
    model.parts[0][2].weight[1, 2, 0, 0] += 0.2


def other_eps(model: Net) -> None:
    model.parts[1][1].eps = 1e-2


def swapped(model: Net) -> None:
    convs = model.parts[0]
    convs[1].weight.data, convs[2].weight.data = convs[2].weight.data, convs[1].weight.data


def test_a_weight_that_differs_is_named_with_both_names(compared):
    code, said, _ = compared(False, other_weight)
    assert code == 2 and "convs.2.Conv2d" in said and "filters.2.Conv2d" in said, said


@pytest.mark.parametrize("alike", [False, True])
def test_another_norm_is_named_with_both_names(compared, alike):
    code, said, _ = compared(alike, other_eps)
    assert code == 2 and "norms.1.BatchNorm2d" in said and "scales.1.BatchNorm2d" in said, said


def test_weights_that_changed_places_are_never_the_same(compared):
    assert compared(False, swapped)[0] == 2
