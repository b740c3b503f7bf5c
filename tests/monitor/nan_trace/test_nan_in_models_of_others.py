"""Models that nobody here wrote: masks of minus infinity are no finding, a planted NaN and an overflow are named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import trainprobe
from benchmarks.dump_compare.foreign import Way, batches, build, loss_of
from trainprobe.cli import main


class Logarithm(nn.Module):
    """What is planted in the place of an activation."""

    def forward(self, x):
        return torch.log(x)


class Growing(nn.Module):
    """Multiplies until float32 ends."""

    def forward(self, x):
        return x * 1e38 * 1e38


def traced(folder, family, capsys, plant=None):
    model = build(family, Way())
    if plant is not None:
        model.model.layers[1].mlp.act_fn = plant
    data = batches(family, torch.float32)
    with trainprobe.watch(model, output=folder, level="mix", console=False) as probe:
        for _ in range(2):
            with probe.step():
                loss_of(model, family, next(data)).backward()
    capsys.readouterr()
    code = main(["nan-trace", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")
def test_a_mask_of_minus_infinity_is_no_finding(tmp_path, capsys):
    """torch.nn.Transformer adds a causal mask of it."""
    code, told = traced(tmp_path, "transformer", capsys)
    assert (code, told["found"], told["steps"]) == (0, False, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("plant", "what", "op"), [(Logarithm(), "NaN", "Torch.log"), (Growing(), "infinity", "Tensor.mul")])
def test_what_is_planted_in_a_language_model_is_named(tmp_path, capsys, plant, what, op):
    pytest.importorskip("transformers")
    code, told = traced(tmp_path, "llama", capsys, plant)
    first = told["first"]
    assert (code, told["step"], first["what"], first["origin"], first["at"]["name"]) == (1, 0, what, "made", op)
    assert "layers.1.mlp" in first["entry"]
