"""Two models under one optimizer, which no module holds: a coarse and a fine field, an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations.records import recorded
from trainprobe.integrations.torch_loop import attach, attach_to_script

STEPS = 4


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)


def train(encoder: nn.Module, decoder: nn.Module, parameters: Callable[[], object], late: bool = False) -> list[float]:
    """Return the gradient norms of the decoder's weight. late: the optimizer is made behind the first forward pass."""
    x, norms = torch.linspace(-1, 1, 32).reshape(8, 4), []
    if late:
        decoder(encoder(x))
    optimizer = torch.optim.SGD(parameters(), lr=0.1)  # type: ignore[arg-type]
    for _ in range(STEPS):
        optimizer.zero_grad()
        (decoder(encoder(x)) - 1).square().mean().backward()
        norms.append(float(decoder.weight.grad.norm()))  # type: ignore[union-attr]
        optimizer.step()
    return norms


def test_models_of_one_optimizer_are_watched_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    encoder, decoder = networks()
    loop = attach_to_script({"level": "L0", "monitor": True, "output": tmp_path / "out"})
    norms = train(encoder, decoder, lambda: chain(encoder.parameters(), decoder.parameters()))
    loop.close()
    steps = recorded(tmp_path / "out")
    assert [step["1.weight grad"] for step in steps.values()] == pytest.approx(norms, rel=1e-6)
    assert all(step["0.0.weight grad"] > 0 for step in steps.values())
    said = capsys.readouterr().err
    assert f"{STEPS} steps watched, no findings" in said
    assert "not watched" not in said
    assert loop.findings == []


def test_their_order_is_that_of_the_optimizer(tmp_path: Path):
    encoder, decoder = networks()
    loop = attach_to_script({"level": "L0", "monitor": True, "output": tmp_path / "out"})
    train(encoder, decoder, lambda: chain(decoder.parameters(), encoder.parameters()))
    loop.close()
    assert {"0.weight grad", "1.0.weight grad"} <= recorded(tmp_path / "out")[0].keys()


def test_parameters_of_no_module_do_not_make_a_list(tmp_path: Path):
    encoder, decoder = networks()
    model, scale = nn.Sequential(encoder, decoder), nn.Parameter(torch.ones(()))
    loop = attach_to_script({"level": "L0", "monitor": True, "output": tmp_path / "out"})
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    for _ in range(STEPS):
        (model(torch.ones(8, 4)) * scale).square().mean().backward()
        optimizer.step()
    loop.close()
    assert "1.weight grad" in recorded(tmp_path / "out")[0]  # the name inside the one model


@pytest.mark.parametrize("given", [False, True])
def test_what_the_optimizer_of_the_model_steps_too_is_never_untrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: bool
):
    encoder, decoder = networks()
    plan = {"level": "L0", "monitor": True, "output": tmp_path / "out"}
    loop = attach(encoder, plan=plan) if given else attach_to_script(plan)
    train(encoder, decoder, lambda: chain(encoder.parameters(), decoder.parameters()), late=True)
    loop.close()
    said = capsys.readouterr().err
    assert "no optimizer updates it" not in said
    assert ("Updated by the optimizer of the watched model and not watched: Linear (2 parameter tensors)." in said) != given
