"""A weight that holds the same numbers in another order is named as that, and a mask of −10⁴ hides nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.dump_compare.intervals import MASKED, by_statistics

ORDERS = {
    "transposed": (lambda w: w.T, "the same numbers, transposed"),
    "rows": (lambda w: w.flip(0), "the same numbers in another order"),
    "other numbers": (lambda w: w * 1.5, "1.5 times as large in B"),
}


def train(output, summary, task, change=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    if change is not None:
        with torch.no_grad():
            model[2].weight.copy_(change(model[2].weight.clone()))
    fields = {"level": "mix", "summary": summary, "task": task, "step": [0], "console": False}
    with trainprobe.watch(model, None, output=output, **fields) as probe, probe.step(0):
        model(torch.randn(4, 6)).square().mean().backward()
    return str(output)


def said_of(order, summary, task, folder, capsys):
    """Return what is said of two dumps, the weight of one of which is in another order."""
    sides = train(folder / "a", summary, task), train(folder / "b", summary, task, ORDERS[order][0])
    capsys.readouterr()
    assert main(["dump-compare", *sides, "-q"]) == 2
    said = capsys.readouterr().out
    assert "Module.2.Linear.forward.0" in said
    return said


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_a_weight_is_named_by_its_elements(order, tmp_path, capsys):
    assert ORDERS[order][1] in said_of(order, "statistics", "tensor", tmp_path, capsys)


@pytest.mark.parametrize("order", ["transposed", "rows"])
def test_the_order_of_a_weight_is_named_by_fingerprints(order, tmp_path, capsys):
    assert "the same numbers in another order" in said_of(order, "both", "statistics", tmp_path, capsys)


def test_a_mask_of_ten_thousand_tells_nothing_of_the_scores_beside_it():
    scores = torch.rand(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # none below 0
    masked = [(scores * by + torch.full((8, 8), -1e4).triu(1)).float() for by in (1.0, 1.3)]
    told = [{"norm": float(x.norm()), "max": float(x.max()), "min": float(x.min()), "mean": float(x.mean())} for x in masked]
    far = by_statistics(*told, 64, None)
    rest = [x[x > -5e3].double() for x in masked]
    exact = float((rest[0] - rest[1]).norm() / rest[1].norm())
    assert far != MASKED
    assert far.low <= exact <= far.high * 1.001
    assert far.low > 100 * abs(told[0]["norm"] - told[1]["norm"]) / told[0]["norm"]
