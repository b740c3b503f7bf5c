"""Trainings that go wrong without an error, under the default plan: each fault is named, its healthy twin raises no alarm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainprobe
from trainprobe.monitor.findings import causes

STEPS = 72  # the default audits 0, 1, 23, 24, 46, 47, 69 and 70
TOKENS, WIDTH = 20, 16


class Language(nn.Module):
    """Embedding, one hidden layer and a head that is tied to the embedding, unless `tied` is false."""

    def __init__(self, tied=True):
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        """Return logits [batch, time, tokens]."""
        return self.head(self.hidden(self.table(tokens)).tanh())


class Routed(nn.Module):
    """Two of four experts for each row; `hidden` ones are never chosen. fused: one parameter holds all experts."""

    def __init__(self, *, fused=False, hidden=()):
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        made = [nn.Linear(6, 6) for _ in range(4)]
        self.experts = nn.Module() if fused else nn.ModuleList(made)
        if fused:
            self.experts.up = nn.Parameter(torch.stack([linear.weight.detach().T for linear in made]))
        self.fused, self.hidden = fused, list(hidden)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        """[rows, 6] to [rows, 3]."""
        logits = self.router(x)
        logits[:, self.hidden] = -1e4
        weights, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in range(4):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            if row.numel():
                done = x[row] @ self.experts.up[expert] if self.fused else self.experts[expert](x[row])
                out = out.index_add(0, row, done * weights[row, place, None])
        return self.head(x + out)


def found(tmp_path, model, loss_of, *, lr=1e-2, between=None, schedule=None, steps=STEPS, kind=torch.optim.AdamW):
    """Train under the default audit; return (rule, step, message) of each alarm. loss_of(step number) returns the loss."""
    optimizer = kind(model.parameters(), lr=lr)
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for step in range(steps):
            if between is not None:
                between(step)
            with probe.step():
                optimizer.zero_grad()
                loss_of(step).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
    return [(f.rule, f.step, f.message) for f in probe.findings if f.severity != "info"]


def numbers(step, rows=32):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def loss_on_numbers(model):
    return lambda step: (model(numbers(step)) - numbers(step)[:, :3].sin()).square().mean()


def loss_on_tokens(model, label=lambda step, y: y):
    def loss(step):
        text = torch.randint(TOKENS, (4, 9), generator=torch.Generator().manual_seed(step))
        labels = label(step, text[:, 1:].flatten())
        count = max(1, int((labels != -100).sum()))
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), labels, reduction="sum") / count

    return loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [(), (2,), (1, 3)])
def test_an_expert_that_gets_no_token_is_named(tmp_path, fused, hidden):
    torch.manual_seed(1)
    model = Routed(fused=fused, hidden=hidden)
    told = found(tmp_path, model, loss_on_numbers(model))
    assert [(rule, step) for rule, step, _ in told] == ([("idle_experts", 47)] if hidden else [])
    if hidden:
        word = "expert 2 of 4" if hidden == (2,) else "experts 1, 3 of 4"
        assert told[0][2].startswith(f"{word} in experts got no gradient")


def test_experts_that_few_rows_are_shared_out_among_are_no_finding(tmp_path):
    """One row a step leaves two of four experts without a gradient each time, and one of them may well wait for long."""
    torch.manual_seed(1)
    model = Routed(hidden=(2,))
    assert found(tmp_path, model, lambda step: model(numbers(step, 1)).square().mean()) == []


def test_an_expert_that_the_router_leaves_in_mid_run_is_named(tmp_path):
    torch.manual_seed(1)
    model = Routed()

    def between(step):
        model.hidden = [0] if step >= 10 else []

    told = found(tmp_path, model, loss_on_numbers(model), between=between)
    assert [(rule, step) for rule, step, _ in told] == [("idle_experts", 70)]


@pytest.mark.parametrize("faulty", [True, False])
def test_targets_that_are_all_ignored_are_named(tmp_path, faulty):
    model = Language()
    ignored = lambda step, y: torch.full_like(y, -100) if faulty else y.masked_fill(y < 9, -100)  # noqa: E731
    told = found(tmp_path, model, loss_on_tokens(model, ignored), steps=3)
    assert [(rule, step) for rule, step, _ in told] == ([("loss_inputs", 1)] if faulty else [])
    assert not faulty or told[0][2].startswith("all 32 targets of cross_entropy are ignored")


def test_a_single_step_whose_targets_are_all_ignored_is_no_finding(tmp_path):
    model = Language()
    once = lambda step, y: torch.full_like(y, -100) if step == 1 else y  # noqa: E731
    assert found(tmp_path, model, loss_on_tokens(model, once), steps=26) == []


def test_the_mean_over_targets_that_are_all_ignored_is_named_at_once_and_nothing_else_is_blamed(tmp_path):
    """It is NaN, with a gradient of zeros: that is no other loss than the one that was differentiated."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, optimizer, level="off", monitor=True, audit=True, output=tmp_path / "out") as probe:
        for step in range(3):
            with probe.step():
                optimizer.zero_grad()
                text = torch.randint(TOKENS, (4, 9), generator=torch.Generator().manual_seed(step))
                labels = torch.full_like(text[:, 1:], -100) if step == 1 else text[:, 1:]
                loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), labels.flatten())
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    told = [(f.rule, f.step) for f in probe.findings if f.severity != "info"]
    assert sorted(told) == [("loss_inputs", 1), ("nonfinite", 1)]
    assert causes(probe.findings)[0].rule == "loss_inputs"
    message = next(f.message for f in probe.findings if f.rule == "loss_inputs")
    assert message == "all 32 targets of cross_entropy are ignored (ignore_index): their mean is 0 / 0, NaN"


@pytest.mark.parametrize("faulty", [True, False])
def test_a_rate_that_never_rises_from_zero_is_named(tmp_path, faulty):
    model = nn.Linear(6, 3)
    told = found(tmp_path, model, loss_on_numbers(model), schedule=lambda at: at // 1000 if faulty else min(1.0, at / 60))
    assert [(rule, step) for rule, step, _ in told] == ([("standing_rate", 69)] if faulty else [])


def normalised():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("momentum", [0.0, 0.1, None])
def test_running_statistics_that_never_move_in_training_mode_are_named(tmp_path, momentum):
    model = normalised()
    model[1].momentum = momentum
    told = found(tmp_path, model, loss_on_numbers(model))
    assert [(rule, step) for rule, step, _ in told] == ([("moving_buffers", 47)] if momentum == 0.0 else [])
    assert momentum != 0.0 or told[0][2].startswith("1.running_mean")


def test_running_statistics_that_a_nan_keeps_where_they_are_are_not_said_to_have_no_momentum(tmp_path):
    model = normalised()
    losses = loss_on_numbers(model)

    def loss(step):
        if step == 10:
            with torch.no_grad():
                model(numbers(step) * float("nan"))
        return losses(step)

    assert "moving_buffers" not in [rule for rule, _, _ in found(tmp_path, model, loss, steps=76)]


@pytest.mark.parametrize("how", ["training mode", "evaluation mode"])
def test_an_evaluation_in_training_mode_far_from_audited_steps_is_seen_by_the_batches_that_were_averaged(tmp_path, how):
    model = normalised()

    def between(step):
        if step % 20 == 10:
            model.train(how == "training mode")
            with torch.no_grad():
                for number in (1, 2, 3):
                    model(numbers(1000 + number))
            model.train()

    told = found(tmp_path, model, loss_on_numbers(model), between=between)
    expected = [("untouched_between_steps", 23)] if how == "training mode" else []
    assert [(rule, step) for rule, step, _ in told] == expected
    assert not told or "averaged 3 more batches between steps 1 and 23 than these steps train on (1 each)" in told[0][2]


def test_more_forwards_in_some_steps_than_in_others_are_no_evaluation(tmp_path):
    model = normalised()
    losses = loss_on_numbers(model)
    assert found(tmp_path, model, lambda step: losses(step) + (losses(step + 500) if step % 2 else 0.0)) == []


@pytest.mark.parametrize("how", ["copied", "tied", "apart", "zeros"])
def test_an_embedding_and_a_head_that_were_tied_once_are_named(tmp_path, how):
    torch.manual_seed(3)
    model = Language(tied=how != "apart")
    if how == "zeros":
        nn.init.zeros_(model.table.weight)
    if how in ("copied", "zeros"):
        model.head.weight = copy.deepcopy(model.table.weight)
    told = found(tmp_path, model, loss_on_tokens(model), steps=3)
    assert [(rule, step) for rule, step, _ in told if rule == "ties"] == ([("ties", 0)] if how == "copied" else [])
    assert how != "copied" or told[0][2].startswith("head.weight and table.weight begin with the same bits")


@pytest.mark.parametrize(
    ("dtype", "lr", "lost"), [(torch.bfloat16, 2e-5, True), (torch.bfloat16, 1e-2, False), (torch.float32, 2e-5, False)]
)
def test_updates_that_round_away_in_weights_of_sixteen_bits_are_named(tmp_path, dtype, lr, lost):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)

    def loss(step):
        return (model(numbers(step).to(dtype)).float() - numbers(step)[:, :3].sin()).square().mean()

    told = found(tmp_path, model, loss, lr=lr)
    rules = [(rule, step) for rule, step, _ in told if rule == "rounded_updates"]
    assert rules == ([("rounded_updates", 47)] if lost else [])
    assert not lost or "of the update rounds away in bfloat16" in next(m for r, _, m in told if r == "rounded_updates")


def test_the_share_of_an_update_that_is_lost_agrees_with_sgd_worked_out_in_float64(tmp_path):
    """All of the change is ‖lr · g‖₁; lost is the part of elements for which bfloat16 rounds p - lr · g back to p."""
    torch.manual_seed(4)
    model = nn.Linear(6, 64).bfloat16()
    shares = {}

    def loss(step):
        out = (model(numbers(0).bfloat16()).float() - 1).square().mean()
        if step == 47:
            grads = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
            changes = [(p.detach().double(), 1e-3 * g.double()) for p, g in zip(model.parameters(), grads, strict=True)]
            stays = [(c.abs() * ((p - c).bfloat16().double() == p)).sum() for p, c in changes]
            shares["lost"] = float(sum(stays) / sum(c.abs().sum() for _, c in changes))
        return out

    told = found(tmp_path, model, loss, lr=1e-3, kind=torch.optim.SGD)
    message = next(m for r, _, m in told if r == "rounded_updates")
    assert shares["lost"] > 0.5
    assert message.startswith(f"{shares['lost']:.0%} of the update rounds away")


def test_a_rate_that_falls_to_its_end_is_no_finding_in_sixteen_bits(tmp_path):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).bfloat16()

    def loss(step):
        return (model(numbers(step).bfloat16()).float() - 1).square().mean()

    told = found(tmp_path, model, loss, lr=1e-2, schedule=lambda at: max(1e-4, 1 - at / 44), steps=120)
    assert "rounded_updates" not in [rule for rule, _, _ in told]


@pytest.mark.parametrize("faulty", [True, False])
def test_inputs_that_are_nothing_but_zeros_are_named(tmp_path, faulty):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    factor = 0.0 if faulty else 1.0
    told = found(tmp_path, model, lambda step: (model(numbers(step) * factor) - 1).square().mean(), steps=26)
    assert [(rule, step) for rule, step, _ in told] == ([("input_scale", 23)] if faulty else [])
