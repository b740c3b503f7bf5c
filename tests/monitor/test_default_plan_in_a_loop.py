"""Healthy loops of plain torch under the default plan: 60 steps and more, and nothing that warns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainprobe.engine.core.records import Finding
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.integrations.torch_loop import attach
from trainprobe.watching import Probe

torch.set_num_threads(1)
STEPS, LR = 64, 1e-2
schedulers = torch.optim.lr_scheduler


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def alarms(findings: list[Finding]) -> list[str]:
    return [f"{f.step} {f.rule}: {f.message}" for f in findings if f.severity != "info"]


@dataclass
class Training:
    """A classifier of points. step: one step of it, to be overridden by assignment. between: called behind each step."""

    model: nn.Module
    optimizer: Any
    step: Callable[[Training, int, Any], Any]
    between: Callable[[int], Any] = lambda number: None


def classify(training: Training, number: int, note: Any) -> None:
    x = torch.randn(16, training.model[0].in_features)
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.model(x), (x.sum(1) > 0).long())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    note("loss", loss)
    note("grad_norm", norm)


def watched(training: Training, folder: Any, first: int = 0, steps: int = STEPS, **plan: Any) -> list[str]:
    """Train under the default plan and return what warns."""
    torch.manual_seed(1)
    with Probe(default_plan() | {"output": folder / "out"} | plan).open(training.model, training.optimizer) as probe:
        for number in range(first, first + steps):
            with probe.step(number):
                training.step(training, number, probe.note)
            training.between(number)
    return alarms(probe.findings)


# ---- schedules: whatever the number of the first step, wherever the scheduler is stepped


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "warm-up from zero": lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 10)),
    "cosine to zero": lambda o: schedulers.CosineAnnealingLR(o, STEPS),
    "in sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 1e-3, total_iters=10), schedulers.CosineAnnealingLR(o, STEPS)], [10]
    ),
    "one cycle of rate and momentum": lambda o: schedulers.OneCycleLR(o, LR, total_steps=3 * STEPS),
    "cut in steps": lambda o: schedulers.StepLR(o, 7, 0.5),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=5), schedulers.ExponentialLR(o, 0.99)]
    ),
}


@pytest.mark.parametrize("first", [0, 1, 43])
@pytest.mark.parametrize("where", ["in the step", "between steps"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_by_step_raises_no_alarm(tmp_path, schedule, where, first):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    scheduler = SCHEDULES[schedule](optimizer)

    def step(training: Training, number: int, note: Any) -> None:
        classify(training, number, note)
        if where == "in the step":
            scheduler.step()
        note("lr", scheduler.get_last_lr()[0])

    def between(number: int) -> None:
        if where == "between steps":
            scheduler.step()
        if number % 20 == 13:
            model.eval()
            model(torch.ones(2, 6))
            model.train()

    training = Training(model, optimizer, step, between)
    if first > 1:  # a run that is resumed: what went before is not watched
        for number in range(first):
            classify(training, number, lambda name, value: None)
            scheduler.step()
    assert watched(training, tmp_path, first) == []


def test_a_scheduler_that_is_stepped_to_where_it_was_raises_no_alarm(tmp_path):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = SCHEDULES["warm-up from zero"](optimizer)

    def step(training: Training, number: int, note: Any) -> None:
        for _ in range(43 if number == 43 else 0):
            scheduler.step()
        classify(training, number, note)
        scheduler.step()

    assert watched(Training(model, optimizer, step), tmp_path, first=43) == []


def test_a_warm_up_that_is_set_by_hand_over_a_scheduler_raises_no_alarm(tmp_path):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = schedulers.StepLR(optimizer, 1000)

    def step(training: Training, number: int, note: Any) -> None:
        if number < 30:
            optimizer.param_groups[0]["lr"] = LR * (number + 1) / 30
        classify(training, number, note)
        scheduler.step()

    assert watched(Training(model, optimizer, step), tmp_path) == []


def test_only_some_steps_may_be_watched(tmp_path):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = SCHEDULES["cosine to zero"](optimizer)

    def step(training: Training, number: int, note: Any) -> None:
        classify(training, number, note)
        scheduler.step()

    def between(number: int) -> None:
        for _ in range(3 if number < 15 else 0):
            step(training, number, lambda name, value: None)

    training = Training(model, optimizer, step, between)
    assert watched(training, tmp_path) == []


@pytest.mark.parametrize("twice_from", [0, 30])
def test_a_scheduler_that_is_stepped_twice_is_found_and_is_an_error_once_it_was_stepped_once(tmp_path, twice_from):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = SCHEDULES["cut in steps"](optimizer)

    def step(training: Training, number: int, note: Any) -> None:
        classify(training, number, note)
        for _ in range(2 if number >= twice_from else 1):
            scheduler.step()

    with Probe(default_plan() | {"output": tmp_path / "out"}).open(model, optimizer) as probe:
        for number in range(50):
            with probe.step(number):
                step(Training(model, optimizer, step), number, probe.note)
    first = next(f for f in probe.findings if f.severity != "info")
    assert (first.rule, first.severity) == ("learning_rate", "error" if twice_from else "warning")
    assert twice_from <= first.step <= twice_from + 23


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_nothing_moves_at_a_rate_of_zero_and_no_alarm_is_raised(tmp_path, optimizer):
    model = mlp(6, 16, 2)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=LR, weight_decay=0.1)
    scheduler = schedulers.LambdaLR(made, lambda step: float(20 <= step < 40))

    def step(training: Training, number: int, note: Any) -> None:
        classify(training, number, note)
        scheduler.step()

    assert watched(Training(model, made, step), tmp_path) == []


@pytest.mark.parametrize("first", [0, 1, 43])
def test_a_loop_that_is_attached_to_raises_no_alarm(tmp_path, first):
    model = mlp(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = SCHEDULES["warm-up from zero"](optimizer)
    torch.manual_seed(1)
    loop = attach(model, optimizer, first_step=first, output=tmp_path / "out", **default_plan())
    training = Training(model, optimizer, classify)
    for number in range(STEPS):
        classify(training, number, lambda name, value: None)
        scheduler.step()
        if number % 20 == 13:
            model.eval()
            model(torch.ones(2, 6))
            model.train()
    found = alarms(loop.findings)
    loop.close()
    assert found == []


# ---- models and recipes that look odd and are not


@pytest.mark.parametrize("held", ["from the start", "as they are thawed"])
def test_gradual_unfreezing_raises_no_alarm(tmp_path, held):
    model = mlp(6, 16, 16, 2)
    optimizer = torch.optim.Adam(model.parameters() if held == "from the start" else model[4].parameters(), lr=LR)
    model[:4].requires_grad_(False)

    def thaw(number: int) -> None:
        if number in (11, 30):
            layer = model[2 if number == 11 else 0].requires_grad_(True)
            if held != "from the start":
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": LR / 10})

    assert watched(Training(model, optimizer, classify, thaw), tmp_path) == []


def test_what_is_thawed_and_held_by_no_optimizer_is_found(tmp_path):
    model = mlp(6, 16, 16, 2)
    optimizer = torch.optim.Adam(model[4].parameters(), lr=LR)
    model[:4].requires_grad_(False)
    found = watched(Training(model, optimizer, classify, lambda n: model[2].requires_grad_(n >= 11)), tmp_path)
    assert any("trainable_set: 2.weight" in text and "no optimizer holds it" in text for text in found)


def test_norms_and_clipping_in_bfloat16_raise_no_alarm(tmp_path):
    model = mlp(6, 64, 64, 2).bfloat16()

    def step(training: Training, number: int, note: Any) -> None:
        x = torch.randn(16, 6)
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.bfloat16()).float(), (x.sum(1) > 0).long())
        loss.backward()
        note("grad_norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        training.optimizer.step()
        note("loss", loss)

    training = Training(model, torch.optim.AdamW(model.parameters(), lr=LR), step)
    assert watched(training, tmp_path, steps=120, audit={"every": 1}) == []


class Sampling(nn.Module):
    """A variational autoencoder as in PyTorch's own example, which samples in every mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.mean, self.spread, self.leave = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(16, 2), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.enter(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.leave(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


class Careless(nn.Module):
    """A dropout that asks for no mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leave = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return functional.dropout(self.leave(x), 0.2), torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(("model", "rules"), [(Sampling, []), (Careless, ["evaluation"])])
def test_sampling_in_an_evaluation_is_meant_and_dropout_is_not(tmp_path, model, rules):
    made = model()

    def step(training: Training, number: int, note: Any) -> None:
        x = torch.rand(16, 6)
        training.optimizer.zero_grad()
        out, mean, spread = made(x)
        loss = functional.mse_loss(out, x) - 0.05 * (1 + spread - mean**2 - spread.exp()).mean()
        loss.backward()
        training.optimizer.step()
        note("loss", loss)

    def evaluate(number: int) -> None:
        if number % 16 == 9:
            made.eval()
            made(torch.ones(2, 6))
            made.train()

    found = watched(Training(made, torch.optim.Adam(made.parameters(), lr=1e-3), step, evaluate), tmp_path)
    assert sorted({text.split()[1].rstrip(":") for text in found}) == rules


@pytest.mark.parametrize("names", [("loss_d", "loss_g"), ("loss",)])
def test_adversaries_whose_losses_go_up_and_down_raise_no_alarm(tmp_path, names):
    model = nn.ModuleList([mlp(4, 32, 12), mlp(12, 32, 1)])
    both = [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in model]

    def step(training: Training, number: int, note: Any) -> None:
        makes, judges = model
        real, made = torch.randn(32, 12) * 0.1 + 2, makes(torch.randn(32, 4))
        both[1].zero_grad()
        lost = functional.softplus(-judges(real)).mean() + functional.softplus(judges(made.detach())).mean()
        lost.backward()
        both[1].step()
        both[0].zero_grad()
        fooled = functional.softplus(-judges(made)).mean()
        fooled.backward()
        both[0].step()
        for name, loss in zip(names, (lost, fooled), strict=False):
            note(name, loss)

    assert watched(Training(model, both, step), tmp_path, steps=300) == []


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_toy_that_has_converged_to_the_last_bit_raises_no_alarm(tmp_path, optimizer):
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]]) + 1
    model = mlp(3, 1)

    def step(training: Training, number: int, note: Any) -> None:
        training.optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        training.optimizer.step()
        note("loss", loss)

    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1 if optimizer == "SGD" else 0.05)
    assert watched(Training(model, made, step), tmp_path, steps=700) == []


@pytest.mark.parametrize("what", ["a constant", "memory that nobody has filled", "a quotient left out", "clipping"])
def test_what_is_not_finite_and_reaches_nothing_is_a_note_at_level_mix(tmp_path, what):
    model = mlp(6, 16, 2)

    def forward(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        if what == "a constant":
            return torch.minimum(out, torch.full_like(out, math.inf))
        if what == "memory that nobody has filled":
            memory = torch.full((16, 16), math.nan)  # the bits that torch.empty may hand out
            return memory.copy_(out)
        if what == "a quotient left out":
            return torch.where(out > -1e9, out, 1 / torch.zeros_like(out))
        return out

    model[0].register_forward_hook(forward)

    def step(training: Training, number: int, note: Any) -> None:
        x = torch.randn(16, 6)
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        if what == "clipping":
            torch.minimum(torch.tensor(math.inf), model[0].weight.grad.norm())
        training.optimizer.step()
        note("loss", loss)

    training = Training(model, torch.optim.AdamW(model.parameters(), lr=LR), step)
    plan = {"level": "mix", "step": [1, 2, 3], "on_existing": "replace"}
    assert watched(training, tmp_path, steps=5, **plan) == []


def test_a_nan_that_reaches_the_loss_is_an_error_and_named_beside_a_constant_that_does_not(tmp_path):
    model = mlp(6, 16, 2)
    model[1].register_forward_hook(lambda module, inputs, out: torch.minimum(out, torch.full_like(out, math.inf)))
    model[1].register_forward_hook(lambda module, inputs, out: out / (out * 0) if module.broken else None)
    model[1].broken = False
    training = Training(
        model, torch.optim.AdamW(model.parameters(), lr=LR), classify, lambda n: setattr(model[1], "broken", n > 1)
    )
    found = watched(training, tmp_path, steps=4, level="mix", step=[1, 2, 3], on_existing="replace", audit=None)
    assert len(found) == 1
    assert "3 nonfinite: the first NaN of step 3 is in op Tensor.div" in found[0]


def test_what_another_loss_leaves_or_a_trial_clears_raises_no_alarm(tmp_path):
    """A batch that is tried and left, a step that climbs first (SAM), and another model's loss that reaches this one."""
    model, other = mlp(6, 16, 2), nn.Linear(2, 1)
    aside = torch.optim.SGD(other.parameters(), lr=1e-3)

    def step(training: Training, number: int, note: Any) -> None:
        x = torch.randn(16, 6)
        aside.zero_grad()
        other(model(x)).square().mean().backward()  # fills the model's gradients too
        nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
        aside.step()
        training.optimizer.zero_grad()
        if number == 0:
            model(x).square().mean().backward()
            training.optimizer.zero_grad()
        functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        with torch.no_grad():
            stood = [(p, p.clone()) for p in model.parameters()]
            for p, _ in stood:
                p.add_(1e-3 * p.grad)
        training.optimizer.zero_grad()
        functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        with torch.no_grad():
            for p, was in stood:
                p.copy_(was)
        training.optimizer.step()

    training = Training(model, torch.optim.SGD(model.parameters(), lr=LR), step)
    assert watched(training, tmp_path) == []
