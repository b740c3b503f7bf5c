"""An update is worked out again by its rule: silent for torch's own optimizers in every form, right about planted faults."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.monitor.audit.observers.update_rules import adam, adamw, sgd

KINDS = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "Adam with decay and amsgrad": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    "SGD with Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def audited(folder, make, dtype=torch.float32, steps=5, **audit):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)
    optimizer = make(model.parameters())
    plan = {"level": "off", "sinks": [], "audit": {"every": 1, **audit}}
    with trainprobe.watch(model, optimizer, plan=plan, output=folder) as probe:
        for step in range(steps):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
                optimizer.step()
    return [f for f in probe.findings if f.severity != "info"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_optimizers_follow_their_rule_in_every_form(tmp_path, kind, form):
    cls, options = KINDS[kind]
    if form == "fused" and options.get("amsgrad"):
        options = {**options, "amsgrad": False}
    assert [f.message for f in audited(tmp_path / "out", lambda p: cls(p, **options, **FORMS[form]))] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_have_a_floor_of_their_own(tmp_path, dtype):
    assert [f.message for f in audited(tmp_path / "out", lambda p: torch.optim.AdamW(p, lr=1e-2), dtype=dtype)] == []


@pytest.mark.parametrize(
    ("rule", "kind"), [(adam, "Adam"), (adamw, "AdamW"), (sgd, "SGD with momentum"), (adam, "Adam with decay and amsgrad")]
)
def test_the_rules_are_those_of_torch_in_float64(rule, kind):
    cls, options = KINDS[kind]
    p = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    optimizer = cls([p], **options, foreach=False)
    for i in range(4):
        p.grad = torch.sin(torch.arange(7, dtype=torch.float64) + i)
        state = {key: value.detach().clone() for key, value in optimizer.state[p].items() if torch.is_tensor(value)}
        expected, _ = rule(p.detach().clone(), p.grad.clone(), state, optimizer.param_groups[0])
        optimizer.step()
        assert torch.allclose(p.detach(), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD with momentum", "SGD with Nesterov"])
def test_a_gradient_that_all_but_cancels_the_momentum_leaves_roundings_and_is_in_order(tmp_path, kind, form):
    """Weights of 1e-30: their own rounding hides nothing. Each gradient is 1e-6 beside what would cancel to zero."""
    cls, options = KINDS[kind]
    model = nn.Linear(64, 64, bias=False)
    optimizer = cls(model.parameters(), **{**options, "weight_decay": 0.0, "maximize": False}, **FORMS[form])
    draw = torch.Generator().manual_seed(0)
    plan = {"level": "off", "sinks": [], "audit": {"every": 1}}
    with trainprobe.watch(model, optimizer, plan=plan, output=tmp_path / "out") as probe:
        for step in range(2):
            with probe.step(step), torch.no_grad():
                model.weight.fill_(1e-30)
                state = optimizer.state[model.weight] if step else {}
                held = next((state[name] for name in ("exp_avg", "momentum_buffer") if name in state), None)
                fresh = cancelling(kind, held) if step else torch.ones(64, 64)
                model.weight.grad = fresh * (1 + 1e-6 * torch.randn(64, 64, generator=draw))
                optimizer.step()
    assert [f.message for f in probe.findings if f.rule == "update_rule"] == []


def cancelling(kind, momentum):
    """Return the gradient that leaves nothing of the update, in float64 worked out and rounded."""
    factor = {"Adam": 9.0, "AdamW": 9.0, "SGD with momentum": 0.9 / 0.8, "SGD with Nesterov": 0.81 / 1.9}[kind]
    return (-factor * momentum.double()).float()


def after_the_kernel(parameters, spoil):
    """AdamW in whose update something else happens from the third step on."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    stepped = optimizer.param_groups[0]["params"]
    updates = iter(range(100))

    def spoiled(o, args, kwargs):
        if next(updates) >= 2:
            with torch.no_grad():
                spoil(stepped)

    optimizer.register_step_post_hook(spoiled)
    return optimizer


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ps: ps[2][1, 3:5].add_(1e-4),  # something writes to two elements within the update
        lambda ps: ps[2].mul_(0.999),  # weight decay that was taken twice
        lambda ps: ps[2][0].sub_(2 * ps[2].grad[0]),  # another learning rate for one row
    ],
)
def test_an_update_that_its_rule_does_not_give_is_found_in_its_parameter_at_once(tmp_path, spoil):
    found = audited(tmp_path / "out", lambda ps: after_the_kernel(ps, spoil))
    assert (found[0].rule, found[0].step, found[0].site.name) == ("update_rule", 2, "2.weight")


def test_parameters_take_turns_where_they_are_too_many_for_one_step(tmp_path, monkeypatch):
    from trainprobe.monitor.audit.observers import update_rules

    monkeypatch.setattr(update_rules, "_ELEMENTS", 80)  # the first weight has 72 elements, and with its bias 84
    found = audited(tmp_path / "out", lambda ps: after_the_kernel(ps, lambda p: p[2].add_(1e-3)), steps=6)
    assert (found[0].rule, found[0].site.name) == ("update_rule", "2.weight")
    assert found[0].step in (2, 3, 4)


@pytest.mark.parametrize("spoilt", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_of_a_flat_buffer_the_parameter_is_named_that_holds_the_wrong_element(tmp_path, spoilt):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    flat.grad, at = torch.zeros_like(flat), 0
    for p in model.parameters():
        p.data, p.grad = (t[at : at + p.numel()].view_as(p) for t in (flat.data, flat.grad))
        at += p.numel()
    optimizer = torch.optim.AdamW([flat], lr=1e-2)
    wrong = optimizer.register_step_post_hook(lambda *_: dict(model.named_parameters())[spoilt].data.view(-1)[1:2].add_(0.1))
    plan = {"level": "off", "sinks": [], "audit": {"every": 1, "relations": {"update_rule": True}}}
    with trainprobe.watch(model, optimizer, plan=plan, output=tmp_path / "out") as probe, probe.step(0):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    wrong.remove()
    assert [f.site.name for f in probe.findings if f.rule == "update_rule"] == [spoilt]
