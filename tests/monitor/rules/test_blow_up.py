"""A training that blows up in its first steps, against healthy ones that share one of its signs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.monitor.rules.frames_by_hand import Bench, grads, value
from trainprobe.watching import Probe

PLAN = {"level": "off", "sinks": [], "monitor": {"activations": False, "rules": {"blow_up": True}}, "console": False}
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Tensor]]
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
Y = (X @ torch.arange(8.0)).unsqueeze(1)


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), *more, nn.Tanh(), nn.Linear(32, 1))


def regression(make: Callable[[nn.Module], torch.optim.Optimizer], scale: float = 1.0, model: nn.Module | None = None) -> Made:
    model = net() if model is None else model
    return model, make(model), lambda step: (model(X) - scale * Y).square().mean()


def adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


def sgd(rate: float, momentum: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def likelihood() -> Made:
    """The negative log-likelihood of a density: from about 1e4 to below zero."""
    model, spread = net(), nn.Parameter(torch.tensor(-3.0))
    optimizer = torch.optim.Adam([*model.parameters(), spread], lr=0.05)
    return model, optimizer, lambda step: ((model(X) - Y / 20).square() * torch.exp(-2 * spread) / 2 + spread).mean()


def zero_head() -> Made:
    model = net()
    nn.init.zeros_(model[-1].weight)
    return regression(adam(0.1), model=model)


def tiny_head() -> Made:
    model = net()
    nn.init.normal_(model[-1].weight, std=1e-5)
    return regression(adam(0.01), model=model)


def rewards() -> Made:
    """A critic whose targets are nearly zero at first, and large once the first reward is found."""
    model = net()
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda step: (model(X) - (0.01 if step < 20 else 30) * Y).square().mean(),
    )


def policy() -> Made:
    model = net()
    advantages = lambda step: torch.randn(64, 1, generator=torch.Generator().manual_seed(step))  # noqa: E731
    return model, torch.optim.Adam(model.parameters(), lr=3e-3), lambda step: -(advantages(step) * model(X)).mean()


def critic() -> Made:
    """The critic of a WGAN without a limit: its loss sinks below zero, and its gradients grow."""
    model = net()
    return model, torch.optim.RMSprop(model.parameters(), lr=1e-2), lambda step: model(X).mean() - model(X + 1).mean()


HEALTHY = {
    "regression": lambda: regression(adam(0.01)),
    "from afar": lambda: regression(adam(0.1), scale=100.0, model=linear()),
    "fast": lambda: regression(adam(0.5), scale=10.0, model=linear()),
    "summed": lambda: (lambda m, o, f: (m, o, lambda step: f(step) * 1e6))(*regression(adam(0.01))),
    "momentum": lambda: regression(sgd(0.01, 0.9)),
    "batch norm": lambda: regression(adam(0.05), model=net(nn.BatchNorm1d(32))),
    "likelihood": likelihood,
    "zero head": zero_head,
    "tiny head": tiny_head,
    "rewards": rewards,
    "policy": policy,
    "critic": critic,
}
BLOWN = {
    "sgd": lambda: regression(sgd(0.3), model=linear()),
    "sgd with momentum": lambda: regression(sgd(0.2, 0.9), model=linear()),
    "adam": lambda: regression(adam(3.0), model=linear()),
    "no loss below zero": lambda: (lambda m, o, f: (m, o, lambda step: f(step) - 1e3))(*regression(sgd(0.3), model=linear())),
}


def found_in(made: Made, steps: int = 60) -> list:
    model, optimizer, loss_at = made
    with Probe(PLAN) as probe:
        probe.open(model, optimizer)
        for step in range(steps):
            with probe.step():
                loss = loss_at(step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    return [finding for finding in probe.findings if finding.rule == "blow_up"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_start_raises_no_alarm(kind, seed):
    torch.manual_seed(seed)
    assert [finding.message for finding in found_in(HEALTHY[kind]())] == []


@pytest.mark.parametrize("kind", BLOWN)
def test_a_training_that_blows_up_is_found_within_ten_steps_and_once(kind):
    torch.manual_seed(0)
    (finding,) = found_in(BLOWN[kind](), steps=10)
    assert finding.severity == "warning"
    assert finding.step is not None and finding.step < 10
    assert finding.site is not None and finding.site.name in {"0.weight", "2.weight"}


def weight(norm: float, absmax: float = 1.0) -> tuple:
    return value("forward", "parameter", "w", "value", norm=norm, absmax=absmax)


def test_the_first_update_larger_than_its_weight_is_named_with_its_step_and_ratio():
    bench = Bench("blow_up")
    for norm, loss in ((1.0, 7.9), (6.3, 421.0), (8.0, 1426.0), (9.0, 2000.0)):
        bench.feed(weight(norm), loss=loss)
    (finding,) = bench.found
    assert (finding.step, finding.site.name, finding.measured) == (2, "w", pytest.approx(5.3))
    assert finding.message.startswith("the loss rose from 7.9 to 1426. The update of w at step 1 was 5.3 times as large")


@pytest.mark.parametrize(("before", "found"), [(421.0, [2]), (8.1, [])], ids=["after a rise", "from an ordinary loss"])
def test_a_loss_that_is_not_finite_has_blown_up_only_after_it_rose(before, found):
    bench = Bench("blow_up")
    for norm, loss in ((1.0, 7.9), (6.3, before), (8.0, float("nan")), (9.0, float("nan"))):
        bench.feed(weight(norm), loss=loss)
    assert [finding.step for finding in bench.found] == found


@pytest.mark.parametrize("absmax", [0.0, 1e-5])
def test_a_weight_that_begins_at_nothing_is_left_out(absmax):
    bench = Bench("blow_up")
    for norm, loss in ((absmax, 7.9), (6.3, 421.0), (20.0, 1426.0)):
        bench.feed(weight(norm, absmax), loss=loss)
    assert bench.found == []


def test_without_a_loss_the_gradients_are_judged():
    bench = Bench("blow_up")
    for step in range(6):
        bench.feed(weight(3.0**step), *grads({"w": 5.0**step}))
    assert [finding.step for finding in bench.found] == [3]


def test_after_the_window_nothing_is_judged():
    bench = Bench("blow_up", window=5)
    for step in range(9):
        bench.feed(weight(1.0 if step < 5 else 9.0**step), loss=1.0 if step < 5 else 100.0)
    assert bench.found == []


def test_gradients_that_grow_while_a_loss_falls_below_where_it_began_are_no_alarm():
    for falls in (True, False):
        bench = Bench("blow_up")
        for step in range(6):
            loss = 0.5 - step if falls else -0.5 + step
            bench.feed(weight(3.0**step), *grads({"w": 5.0**step}), loss=loss)
        assert [finding.step for finding in bench.found] == ([] if falls else [3])


def test_an_update_of_long_ago_is_not_the_cause():
    for wait in (2, 20):
        bench = Bench("blow_up")
        for step in range(wait + 4):
            bench.feed(weight(1.0 if step == 0 else 9.0), loss=1.0 if step < wait else 100.0)
        assert [finding.step for finding in bench.found] == ([3] if wait == 2 else [])
