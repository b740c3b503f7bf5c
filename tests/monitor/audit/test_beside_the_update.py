"""State beside the optimizer and around the update, under the default plan: planted faults are found, healthy twins are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe

STEPS = 72  # the default audits 0, 1, 23, 24, 46, 47, 69 and 70


class Parts(nn.Module):
    """A frozen body with normalisation and dropout, and a head that is trained."""

    def __init__(self, share=0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(share))
        self.head = nn.Linear(8, 3)
        self.quiet = True

    def forward(self, x):
        """Return [batch, 3]; the body runs without gradients where it is quiet."""
        with torch.set_grad_enabled(not self.quiet):
            h = self.body(x)
        return self.head(h)


def found(tmp_path, model, *, between=None, optimizer=None, scheduler=None, report=None, steps=STEPS):
    """Train under the default audit; return (rule, step) of what was found, and the messages."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = scheduler(optimizer) if scheduler is not None else None
    data = torch.Generator().manual_seed(1)
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for step in range(steps):
            if between is not None:
                between(step)
            with probe.step():
                optimizer.zero_grad()
                out = model(torch.randn(9, 6, generator=data, dtype=torch.float32))
                loss = (out - 1).square().mean()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss if report is None else report(step, loss))
            if schedule is not None:
                schedule.step()
    told = [f for f in probe.findings if f.severity != "info"]
    return [(f.rule, f.step) for f in told], [f.message for f in told]


def frozen(share=0.1, quiet=True):
    torch.manual_seed(2)
    model = Parts(share)
    model.quiet = quiet
    model.body.requires_grad_(False)
    return model


def test_statistics_of_a_frozen_part_that_move_are_found(tmp_path):
    rules, messages = found(tmp_path, frozen(0.0, quiet=False), steps=3)
    assert rules == [("frozen_and_alive", 1)]
    assert "body.1.running_mean" in messages[0]


def test_dropout_in_a_frozen_part_that_runs_without_gradients_is_found(tmp_path):
    model = frozen()
    model.body[1].eval()
    rules, messages = found(tmp_path, model, steps=3)
    assert rules == [("frozen_and_alive", 1)]
    assert "body.2" in messages[0]


@pytest.mark.parametrize("how", ["at rest", "dropout with gradients", "trained", "an average of what is trained"])
def test_frozen_parts_at_rest_and_parts_that_live_are_no_finding(tmp_path, how):
    model = frozen() if how != "trained" else Parts()
    between = None
    if how == "at rest":
        model.body.eval()
    if how == "dropout with gradients":
        model.quiet = False
        model.body[1].eval()
    if how == "trained":
        model.quiet = False
    if how == "an average of what is trained":
        model.body[2].eval()
        other = nn.Linear(6, 8)

        def between(step):
            with torch.no_grad():
                other.weight.add_(0.01)
                for mine, its in zip(model.body[0].parameters(), other.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
                model.body[1].weight.add_(0.001)
                model.body[1].bias.add_(0.001)

    assert found(tmp_path, model, between=between, steps=26)[0] == []


def test_an_average_that_the_optimizer_holds_and_leaves_as_it_is_is_no_finding(tmp_path):
    """As BYOL is often written: `SGD(model.parameters())`, with the momentum encoder, frozen, in the model."""
    model = nn.ModuleDict({"online": nn.Linear(6, 3), "target": nn.Linear(6, 3).requires_grad_(False)})
    model.forward = lambda x: model["online"](x) - model["target"](x).detach()  # type: ignore[method-assign]

    def between(step):
        with torch.no_grad():
            for target, online in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                target.lerp_(online, 0.05)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert found(tmp_path, model, between=between, optimizer=optimizer, steps=26)[0] == []


def test_what_is_held_and_runs_without_gradients_at_each_step_is_found(tmp_path):
    model = Parts()
    rules, messages = found(tmp_path, model)
    assert rules == [("never_reached", 24)]
    assert "body.0.weight" in messages[0]


def test_a_part_without_gradients_in_evaluation_mode_or_left_out_of_the_optimizer_is_no_finding(tmp_path):
    model = Parts()
    model.body.eval()
    assert found(tmp_path / "a", model)[0] == []
    model = Parts(0.0)
    model.body[1].eval()
    rules, _ = found(tmp_path / "b", model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1))
    assert rules == []  # as a body whose head is probed, or a teacher in the model, whatever requires_grad says
    model.quiet = False
    rules, _ = found(tmp_path / "c", model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1))
    assert rules[0] == ("ownership", 0)


@pytest.mark.parametrize(
    ("name", "leak", "back"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (
            "precision of float32 matrix products",
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
    ],
)
def test_what_an_evaluation_leaves_switched_on_is_found(tmp_path, name, leak, back):
    model = nn.Linear(6, 3)

    def between(step, healthy=False):
        if step == 30:
            leak()
            if healthy:
                back()

    try:
        rules, messages = found(tmp_path / "a", model, between=between)
    finally:
        back()
    assert ("ambient_state", 46) in rules
    assert name in messages[rules.index(("ambient_state", 46))]
    assert found(tmp_path / "b", model, between=lambda step: between(step, True))[0] == []


@pytest.mark.parametrize("whole", [True, False])
def test_an_update_under_autocast_is_found_and_a_forward_under_it_is_not(tmp_path, whole):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe, probe.step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(9, 6)).float().square().mean()
            if whole:
                loss.backward()
                optimizer.step()
        if not whole:
            loss.backward()
            optimizer.step()
    assert [f.rule for f in probe.findings] == (["ambient_state"] if whole else [])


def decays_in(steps, floor=0.0):
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: max(floor, 1 - at / steps))


def test_a_rate_that_stands_at_the_end_of_its_schedule_is_found(tmp_path):
    rules, messages = found(tmp_path, nn.Linear(6, 3), scheduler=decays_in(20), steps=72)
    assert ("standing_rate", 47) in rules
    assert "parameter group 0" in messages[rules.index(("standing_rate", 47))]


@pytest.mark.parametrize("how", ["ends with the training", "a floor", "constant", "warm-up"])
def test_rates_that_stand_where_they_may_are_no_finding(tmp_path, how):
    scheduler = {
        "ends with the training": decays_in(STEPS),
        "a floor": decays_in(20, 0.1),
        "constant": None,
        "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda at: 0.0 if at < 50 else 1.0),
    }[how]
    rules, _ = found(tmp_path, nn.Linear(6, 3), scheduler=scheduler)
    assert "standing_rate" not in [rule for rule, _ in rules]


def test_a_loss_that_never_changes_by_a_bit_is_found(tmp_path):
    first = []

    def report(step, loss):
        first.append(float(loss.detach()))
        return first[0]

    rules, messages = found(tmp_path, nn.Linear(6, 3), report=report)
    assert ("unchanging_scalars", 47) in rules
    assert "loss" in messages[rules.index(("unchanging_scalars", 47))]


def test_a_loss_of_zero_and_one_that_changes_are_no_finding(tmp_path):
    assert found(tmp_path / "a", nn.Linear(6, 3), report=lambda step, loss: 0.0)[0] == []
    assert found(tmp_path / "b", nn.Linear(6, 3))[0] == []


@pytest.mark.parametrize("how", ["momentum set to 0", "healthy"])
def test_running_statistics_that_stop_in_training_mode_are_found(tmp_path, how):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].num_batches_tracked = None

    def between(step):
        if step == 60 and how == "momentum set to 0":
            model[1].momentum = 0.0

    rules, messages = found(tmp_path, model, between=between)
    assert rules == ([("moving_buffers", 69)] if how == "momentum set to 0" else [])
    assert not messages or "1.running_mean" in messages[0]
