"""What a loss is divided by, at which weights gradients are added up, and whether a schedule does what it was made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.core.records import Place
from trainprobe.monitor.audit.evidence import AuditHistory, Evidence, Streak, TensorsOfStep
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.model import TrainingState
from trainprobe.monitor.audit.facts.updates import BaseRate, Progress, UpdateCounts, UsedGroups
from trainprobe.monitor.audit.plan import validate
from trainprobe.monitor.audit.relations import reached_rate, schedulers_stepped

lr_scheduler = torch.optim.lr_scheduler


def watched(tmp_path, model, optimizers, body, steps):
    """Run `body(step)` as each step under the default audit; return (rule, step) of what was found, and the messages."""
    with trainprobe.watch(model, optimizers, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for step in range(steps):
            with probe.step():
                body(step)
    told = [f for f in probe.findings if f.severity != "info"]
    return [(f.rule, f.step) for f in told], [f.message for f in told]


# ---- gradients that are added up ----------------------------------------------------------------------------------------


class Networks(nn.Module):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(3, 5), nn.Linear(5, 1)


@pytest.mark.parametrize("how", ["not detached", "detached", "cleared in place"])
def test_a_gradient_that_another_loss_left_is_found(tmp_path, how):
    torch.manual_seed(0)
    model = Networks()
    g, d = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.generator, model.discriminator))

    def body(step):
        g.zero_grad()
        d.zero_grad()
        fake = model.generator(torch.randn(4, 3))
        model.discriminator(fake.detach() if how == "detached" else fake).square().mean().backward()
        d.step()
        if how == "cleared in place":
            for p in model.generator.parameters():
                p.grad.zero_()
        model.discriminator(model.generator(torch.randn(4, 3))).mean().backward()
        g.step()

    rules, messages = watched(tmp_path, model, [g, d], body, 2)
    assert rules == ([("accumulated_gradients", 0)] if how == "not detached" else [])
    assert not messages or "generator.weight and 1 more" in messages[0]


@pytest.mark.parametrize("cleared", [False, True])
def test_the_gradient_of_an_ascent_that_is_kept_is_found_and_a_climb_that_clears_is_not(tmp_path, cleared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def body(step):
        x = torch.randn(8, 3)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(0.05 * p.grad)
                optimizer.state[p]["old_p"] = kept[-1]
        if cleared:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, was in zip(model.parameters(), kept, strict=True):
                p.copy_(was)
                optimizer.state[p]["old_p"] = was
        optimizer.step()

    rules, _ = watched(tmp_path, model, optimizer, body, 2)
    assert rules == ([] if cleared else [("accumulated_gradients", 0)])


def test_state_that_the_update_moves_and_something_else_writes_to_is_still_found(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def body(step):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        if step:
            optimizer.state[model.weight]["momentum_buffer"].mul_(2.0)
        optimizer.step()

    assert ("untouched_between_steps", 1) in watched(tmp_path, model, optimizer, body, 2)[0]


def test_accumulated_micro_batches_of_two_optimizers_are_no_finding(tmp_path):
    torch.manual_seed(0)
    model = Networks()
    optimizers = [torch.optim.Adam(part.parameters()) for part in (model.generator, model.discriminator)]

    def body(step):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(3):
            (model.discriminator(model.generator(torch.randn(4, 3))).square().mean() / 3).backward()
        for optimizer in optimizers:
            optimizer.step()

    assert watched(tmp_path, model, optimizers, body, 3)[0] == []


# ---- what a loss is divided by ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["twice", "once", "a mean of four tasks", "by another number"])
def test_a_loss_that_loop_and_engine_divide_is_found(tmp_path, how):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def body(step):
        optimizer.zero_grad()
        for _ in range(4):
            squares = model(torch.randn(8, 3)).square()
            loss = squares.mean() / {"twice": 4, "by another number": 2}.get(how, 1)
            loss = sum(squares.mean(0)) / 4 if how == "a mean of four tasks" else loss
            (loss * 0.25).backward()
        optimizer.step()

    rules, messages = watched(tmp_path, model, optimizer, body, 2)
    assert rules == ([("divided_losses", 0)] if how == "twice" else [])
    assert not messages or "4 micro-batches was divided by 4 twice" in messages[0]


@pytest.mark.parametrize("divisor", ["all", "its own", "all, and multiplied before"])
def test_the_last_incomplete_group_of_micro_batches_is_found_where_it_is_divided_by_all(tmp_path, divisor):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def body(step):
        optimizer.zero_grad()
        count = 3 if step % 5 == 4 else 4
        for _ in range(count):
            loss = model(torch.randn(8, 3)).square().mean()
            if divisor == "all, and multiplied before":  # Accelerate's example for language models
                loss = loss / count * 4
            (loss / (count if divisor == "its own" else 4)).backward()
        optimizer.step()

    rules, messages = watched(tmp_path, model, optimizer, body, 26)
    assert rules == ([("divided_losses", 24)] if divisor == "all" else [])
    assert not messages or "0.75 of the size" in messages[0]


# ---- schedules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["by batch", "by epoch", "long enough", "begins anew"])
def test_a_cosine_that_is_counted_in_epochs_and_stepped_by_batch_is_found(tmp_path, how):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kind = lr_scheduler.CosineAnnealingWarmRestarts if how == "begins anew" else lr_scheduler.CosineAnnealingLR
    scheduler = kind(optimizer, 72 if how == "long enough" else 6)

    def body(step):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if how != "by epoch" or step % 2:
            scheduler.step()

    rules, messages = watched(tmp_path, model, optimizer, body, 25)
    assert rules == ([("passed_end", 23)] if how == "by batch" else [])
    assert not messages or "CosineAnnealingLR is at position 23" in messages[0]


@pytest.mark.parametrize("how", ["the last alone", "all", "once an epoch", "one at zero", "declared"])
def test_a_group_that_a_schedule_by_hand_leaves_out_is_found(tmp_path, how):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    groups = [
        {"params": layer.parameters(), "lr": 0.0 if how == "one at zero" and not i else 0.02} for i, layer in enumerate(model)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.02)
    rules = [lambda at: 1.0, lambda at: 0.99**at]
    scheduler = lr_scheduler.LambdaLR(optimizer, rules) if how == "declared" else None

    def body(step):
        for i, group in enumerate(optimizer.param_groups):
            if scheduler is None and (how == "all" or i == 1):
                group["lr"] = 0.02 * 0.99 ** (step // 12 if how == "once an epoch" else step)
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    found, messages = watched(tmp_path, model, optimizer, body, 26)
    assert [pair for pair in found if pair[0] == "rates_together"] == (
        [("rates_together", 24)] if how == "the last alone" else []
    )
    assert how != "the last alone" or any("group 0 has been 0.02" in message for message in messages)


def evidence(rate, *, base=1e-3, unstepped=True, progress, step=70, history=None):
    """Return evidence of a step that updated at a rate."""
    used = UsedGroups(rates=(rate,), bases=(BaseRate(0, base, unstepped),), progress=progress)
    facts = Facts(TrainingState(ordinal=step), UpdateCounts(1), used)
    return Evidence(step, Place(), facts, TensorsOfStep(), validate(True), history=history or standing(rate))


def standing(rate, looks=5, peak=None):
    """Return a history in which a rate stood at so many audited steps."""
    return AuditHistory(streaks={("rate", "0"): Streak(rate, looks, 0)}, peaks=(rate if peak is None else peak,))


def test_a_scheduler_that_is_never_stepped_is_found_once_an_epoch_has_ended():
    assert len(schedulers_stepped.check(evidence(5e-5, progress=Progress(1)))) == 1
    assert len(schedulers_stepped.check(evidence(1e-3, progress=Progress(3)))) == 1


@pytest.mark.parametrize(
    "healthy",
    [
        evidence(5e-5, progress=Progress(0)),  # the first epoch, whose scheduler is stepped once an epoch
        evidence(1e-3, progress=Progress(2)),  # a rate that begins at its base: nothing is known of the first epochs
        evidence(5e-5, progress=Progress(1), unstepped=False),
        evidence(5e-5, progress=Progress(1), history=standing(4e-5)),  # set by hand
        evidence(5e-5, progress=Progress(1), history=standing(5e-5, looks=2)),
    ],
)
def test_schedulers_that_may_rest_are_no_finding(healthy):
    assert schedulers_stepped.check(healthy) == []


def test_a_warm_up_that_is_longer_than_the_training_is_found():
    assert len(reached_rate.check(evidence(5e-5, progress=Progress(0, 100), history=standing(2e-5)))) == 1


@pytest.mark.parametrize(
    "healthy",
    [
        evidence(5e-5, progress=Progress(0, 200), history=standing(2e-5)),  # before the half
        evidence(5e-5, progress=Progress(5, 0), history=standing(2e-5)),  # nobody says how long it is
        evidence(5e-4, progress=Progress(0, 100), history=standing(2e-4)),
        evidence(5e-5, progress=Progress(0, 100), history=standing(6e-5, peak=1e-3)),  # decays
        evidence(5e-5, base=float("nan"), progress=Progress(0, 100), history=standing(2e-5)),
    ],
)
def test_rates_that_were_reached_or_may_still_be_are_no_finding(healthy):
    assert reached_rate.check(healthy) == []


@pytest.mark.parametrize("how", ["a score in min", "a score in max", "a loss in max", "a loss", "resumed", "never reduced"])
def test_a_plateau_scheduler_with_the_mode_of_another_metric_is_found(tmp_path, how):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mode = "max" if how.endswith("max") else "min"
    patience = 100 if how == "never reduced" else 2
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=patience)
    if how == "resumed":
        scheduler.best = 0.1

    def body(step):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if step % 2:
            scheduler.step(torch.tensor(1 / (1 + step)) if "loss" in how else 1 - 0.4 / (1 + step))

    rules, messages = watched(tmp_path, model, optimizer, body, 25)
    wrong = how in ("a score in min", "a loss in max")
    assert rules == ([("plateau_direction", 23)] if wrong else [])
    assert not messages or f"mode {mode!r}" in messages[0]


@pytest.mark.parametrize("how", ["made anew", "its own", "shared groups", "two networks", "made late"])
def test_a_scheduler_that_moves_an_optimizer_which_does_not_step_is_found(tmp_path, how):
    """Case p06."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 1), nn.Linear(8, 1)
    first = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer = first if how == "its own" else torch.optim.AdamW(model.parameters(), 1e-2)
    if how == "shared groups":  # as wrappers do: the rates that the scheduler moves are those that are used
        optimizer.param_groups = first.param_groups
    if how == "two networks":  # a generator that rests while the discriminator is trained
        first = torch.optim.AdamW(other.parameters(), 1e-2)
    schedule = lr_scheduler.CosineAnnealingLR(first, 60)

    def body(step):
        nonlocal schedule
        if how == "made late" and step == 5:
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, 60)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()

    found, messages = watched(tmp_path, model, [optimizer], body, 45)
    wrong = [message for message in messages if "does not reach the optimizer that steps" in message]
    assert len(wrong) == (how == "made anew")
    assert ("schedulers_stepped" in {rule.rpartition(".")[2] for rule, _ in found}) == (how == "made anew")
