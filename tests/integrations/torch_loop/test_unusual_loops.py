"""Loops that no optimizer of torch.optim drives alone, or whose model is called in its own way: steps, bits, what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.integrations.records import recorded
from tests.lockstep import bits_of
from trainprobe.integrations import torch_loop
from trainprobe.integrations.torch_loop import attach, attach_to_script

PLAN = {"level": "L0", "monitor": True, "audit": {"every": 1}}
Loop = Callable[[], Iterator[torch.Tensor]]  # yields after each update


class CallsItself(nn.Linear):
    """A module whose calls do not pass through torch's, as gpytorch's and Keras's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Parts(nn.Module):
    """A policy of which only the parts are ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.action = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(torch.randn(8, 4)).square().mean()


def by_hand(micros: int = 1) -> Iterator[torch.Tensor]:
    model = net()
    for _ in range(4):
        model.zero_grad()
        for _ in range(micros):
            loss = loss_of(model) / micros
            loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        yield loss
    model.eval()
    loss_of(model)


def accumulated_by_hand() -> Iterator[torch.Tensor]:
    yield from by_hand(micros=3)


def no_grad_by_hand() -> Iterator[torch.Tensor]:
    model = net()
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        yield loss


def one_optimizer_each() -> Iterator[torch.Tensor]:
    model = net()
    optimizers = [torch.optim.Adam([p], lr=0.1) for p in model.parameters()]
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def closure() -> Iterator[torch.Tensor]:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        yield optimizer.step(evaluate).detach()


def in_evaluation_mode() -> Iterator[torch.Tensor]:
    model = net().eval()
    yield from plain(model, model)


def calls_itself() -> Iterator[torch.Tensor]:
    model = CallsItself(4, 1)
    yield from plain(model, model)


def only_parts_are_called() -> Iterator[torch.Tensor]:
    policy = Parts()
    yield from plain(policy, lambda x: policy.value(policy.body(x)) + policy.action(policy.body(x)))


def plain(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], steps: int = 4) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(call)
        loss.backward()
        optimizer.step()
        yield loss


def in_backward() -> Iterator[torch.Tensor]:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        yield loss


# kind → steps that are seen, and losses of them that are checked: the first is missed where only updates show the model
KINDS: dict[Loop, int] = {
    by_hand: 4,
    no_grad_by_hand: 4,
    one_optimizer_each: 4,
    closure: 4,
    only_parts_are_called: 4,
    in_backward: 4,
    accumulated_by_hand: 4,
    in_evaluation_mode: 2,
    calls_itself: 2,
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "trainprobe"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_steps_of_an_unusual_loop_are_seen_one_by_one_and_its_bits_stay(tmp_path, caplog, kind):
    found = []
    for watches in (False, True):
        torch.manual_seed(3)
        loop = attach_to_script({**PLAN, "output": tmp_path / "out"}) if watches else None
        losses = [loss.detach() for loss in kind()]
        if loop is not None:
            loop.close()
        found.append([*map(bits_of, losses), bits_of(torch.get_rng_state())])
    assert found[0] == found[1]
    seen = {step: numbers for step, numbers in recorded(tmp_path / "out").items() if "loss" in numbers}
    assert list(seen) == list(range(KINDS[kind])), lines(caplog)
    if kind not in (closure, accumulated_by_hand):
        assert [n["loss"] for n in seen.values()] == [float(loss) for loss in losses[4 - KINDS[kind] :]]
    assert loop is not None
    assert [f for f in loop.findings if f.severity == "error"] == []


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(line.count(words) for line in lines(caplog))


@pytest.mark.proves("PyTorch", "updates without torch.optim")
def test_updates_by_other_means_are_said_once_and_at_the_end(tmp_path, caplog):
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    list(by_hand())
    loop.close()
    assert said(caplog, "no optimizer of torch.optim makes the update") == 1
    assert said(caplog, "No update of Sequential by an optimizer of torch.optim was seen, 4 by other means") == 1


def test_a_second_model_that_trains_is_named_at_the_end(tmp_path, caplog):
    loop = attach_to_script({"level": "L0", "output": tmp_path / "out"})
    first, second = net(), CallsItself(4, 1)
    list(zip(plain(first, first), plain(second, second), strict=True))
    loop.close()
    assert said(caplog, "Also trained here and not watched: CallsItself (2 parameter tensors, 4 updates by Adam)") == 1
    assert list(recorded(tmp_path / "out")) == [0, 1, 2, 3]


def test_a_model_that_does_not_train_is_said_with_the_one_that_does(tmp_path, caplog):
    model, copy = net(), CallsItself(4, 1)
    loop = attach(model, output=tmp_path / "out")
    list(plain(copy, copy))
    loop.close()
    assert said(caplog, "No update of Sequential by an optimizer of torch.optim was seen") == 1
    assert said(caplog, "Also trained here and not watched: CallsItself") == 1


def test_forwards_without_an_update_are_collected_to_a_limit_and_training_after_them_is_seen(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch_loop, "LIMIT", 5)
    model = net()
    loop = attach(model, level="L0", output=tmp_path / "out")
    for _ in range(20):
        loss_of(model)
    list(plain(model, model))
    loop.close()
    assert said(caplog, "forwards of the model in training mode and no update") == 1
    seen = recorded(tmp_path / "out")
    assert [step for step, numbers in seen.items() if "loss" in numbers] == [1, 2, 3]


def test_backward_passes_of_no_module_are_said(tmp_path, caplog):
    loop = attach_to_script({"output": tmp_path / "out"})
    x = torch.ones(3, requires_grad=True)
    x.square().sum().backward()
    loop.close()
    assert said(caplog, "1 backward passes were seen and no model") == 1
    assert not (tmp_path / "out").exists()
