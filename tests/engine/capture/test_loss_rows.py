"""The row of a batch with the largest loss, against NumPy in float64, and what a spike says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.capture.features.loss_rows import SLOTS
from trainprobe.engine.core.findings import merged
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.monitor.program import row_in_words

ROWS, PLACES, KINDS = 6, 5, 7


class Logits(nn.Module):
    """Logits [rows, places, kinds] of tokens [rows, places]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(KINDS, 8), nn.Linear(8, KINDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)) * 8


def watched(folder: Any, loss: Any, calls: int = 1) -> Any:
    """Return the step's data, and logits and targets of each call."""
    torch.manual_seed(0)
    model, seen = Logits(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plan = {"level": "off", "sinks": ["memory"], "monitor": {"features": {"loss_rows": True}}}
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **plan) as probe:
        probe.begin_step(0)
        for _ in range(calls):
            x = model(torch.randint(0, KINDS, (ROWS, PLACES)))
            y = torch.randint(0, KINDS, (ROWS, PLACES))
            y[2, 1:] = -100
            loss(x, y).backward()
            seen.append((x.detach(), y))
        optimizer.step()
        return probe.end_step(), seen


def by_hand(x: Tensor, y: Tensor) -> list[float]:
    """Return the number of each slot, in float64."""
    logits, targets = x.double().numpy(), y.numpy()
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    there = targets != -100
    own = np.take_along_axis(p, np.where(there, targets, 0)[..., None], -1)[..., 0]
    losses = np.where(there, -np.log(own), 0).sum(1)
    moved = (np.abs(p - np.eye(KINDS)[np.where(there, targets, 0)]).sum(-1) * there).sum(1)
    row = int(losses.argmax())
    return [row, losses[row], np.median(losses), losses[row] / losses.sum(), moved[row] / moved.sum(), len(losses)]


FLAT = {
    "flat": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").mean(),
    "classes second": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "smoothed": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weighted": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.ones(KINDS)),
    "of logarithms": lambda x, y: functional.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("name", FLAT)
def test_the_largest_row_is_that_of_numpy(tmp_path, name):
    step_data, ((x, y),) = watched(tmp_path, FLAT[name])
    found = {f.slot: f.numbers.tolist() for f in step_data.features}
    assert list(found) == list(SLOTS)
    assert [number for (number,) in found.values()] == pytest.approx(by_hand(x, y), rel=1e-5)


def test_nothing_is_unpacked_that_the_program_packs(tmp_path):
    unpacked: list[Tensor] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
            found = FLAT["flat"](x, y)
        assert not unpacked
        return found

    step_data, ((x, y),) = watched(tmp_path, loss)
    assert [float(f.numbers[0]) for f in step_data.features] == pytest.approx(by_hand(x, y), rel=1e-5)


def test_calls_without_gradient_or_class_indices_are_no_loss(tmp_path):
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            functional.cross_entropy(x.flatten(0, 1), y.flatten())
        return functional.cross_entropy(x.flatten(0, 1), x.detach().softmax(-1).flatten(0, 1))

    step_data, _ = watched(tmp_path, loss)
    assert not step_data.features
    assert any("no cross-entropy of class indices was seen" in note for note in step_data.notes)


def test_targets_that_lie_unlike_the_input_are_left_out_and_a_note_says_so(tmp_path):
    """Twelve masked places of [6, 5] could be cut into six rows, and would be none."""
    chosen = lambda x, y: functional.cross_entropy(x.flatten(0, 1)[::2][:12], y.abs().flatten()[:12] % KINDS)  # noqa: E731
    step_data, _ = watched(tmp_path, chosen)
    assert not step_data.features
    assert any("loss rows leave out targets [12] that lie unlike the input [6, 5]" in note for note in step_data.notes)


def far(x: Tensor, y: Tensor) -> Tensor:
    """Return a loss in which row 4 alone is wrong: all others are sure of their targets."""
    sure = functional.one_hot(y.clamp(min=0), KINDS) * 30.0
    sure[4] = -sure[4]
    return FLAT["flat"](x * 0 + sure, y)


def test_a_row_that_stands_out_is_named_with_its_call_and_no_other(tmp_path):
    parts = iter((FLAT["flat"], far))
    step_data, _ = watched(tmp_path / "far", lambda x, y: next(parts)(x, y), calls=2)
    assert row_in_words(step_data).startswith("row 4 of 6 in loss call 1 on rank 0 has ")
    assert row_in_words(watched(tmp_path / "even", FLAT["flat"])[0]) == ""


def test_a_row_is_told_with_the_tokens_around_its_largest_loss(tmp_path):
    torch.manual_seed(0)
    model, tokens, y = Logits(), *torch.randint(0, KINDS, (2, ROWS, PLACES))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sure = functional.one_hot(y, KINDS) * 30.0
    sure[4, 3] = -sure[4, 3]
    plan = {"level": "off", "sinks": ["memory"], "monitor": {"features": {"loss_rows": {"tokens": 3}}}}
    with trainprobe.watch(model, optimizer, output=tmp_path, on_error="raise", **plan) as probe:
        probe.begin_step(0)
        FLAT["flat"](model(tokens) * 0 + sure, y).backward()
        optimizer.step()
        step_data = probe.end_step()
    around = tokens[4, 2:].tolist()
    assert [f.numbers.tolist() for f in step_data.features if f.slot == "loss_row_tokens"] == [around]
    assert row_in_words(step_data).endswith(f", around tokens {' '.join(map(str, around))}")
    assert row_in_words(step_data, lambda given: f"{given} " * 9).endswith(f", around '{(f'{around} ' * 9)[:79]}…'")
    assert row_in_words(step_data, lambda given: {}[given]).endswith(f", around tokens {' '.join(map(str, around))}")


def test_of_ranks_that_say_the_same_the_one_that_knows_the_row_is_heard():
    site = Site("scalar", "loss", "value")
    of = lambda rank, more="": Finding("spike", "warning", f"loss jumped{more}", 3, Place(rank, 4), site)  # noqa: E731
    (found,) = merged([of(0), of(1), of(3, "; row 4 of 6 on rank 3"), of(2)])
    assert found.message == "loss jumped; row 4 of 6 on rank 3"
    assert found.ranks == (0, 1, 2, 3)


def test_the_audit_looks_at_the_same_function_in_every_step(tmp_path):
    """Both stand in its place: each calls what it found there, so that none calls itself by way of the other."""
    model, seen = Logits(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"level": "off", "sinks": ["memory"], "audit": {"every": 1}, "monitor": {"features": {"loss_rows": True}}}
    before = torch._C._nn.cross_entropy_loss
    with trainprobe.watch(model, optimizer, output=tmp_path, on_error="raise", **plan) as probe:
        for step in range(5):
            probe.begin_step(step)
            tokens, y = torch.randint(0, KINDS, (2, ROWS, PLACES))
            probe.declare_loss(lambda own, tokens=tokens, y=y: FLAT["flat"](own(tokens), y))  # the audit runs it too
            x = model(tokens)
            FLAT["flat"](x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append([float(f.numbers[0]) for f in probe.end_step().features] == pytest.approx(by_hand(x.detach(), y), 1e-5))
    assert seen == [True] * 5
    assert torch._C._nn.cross_entropy_loss is before
