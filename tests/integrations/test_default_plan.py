"""What an integration does with no plan: what is watched, the audit with it, and a line that states its cost in figures."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.lockstep import bits_of
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.engine.plan.loading import load_plan
from trainprobe.integrations import describe
from trainprobe.integrations.expected_cost import expected
from trainprobe.integrations.torch_loop import attach
from trainprobe.watching import Probe


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200, bias=False), nn.Tanh(), nn.Linear(200, 10, bias=False))  # 22,000 parameters


def opened(tmp_path, plan) -> Probe:
    return Probe(plan, output=tmp_path / "out").open(small(), None)


def test_gradients_parameters_scalars_and_the_audit_are_watched():
    plan = load_plan(default_plan())
    assert plan.audit is True
    assert {kind: plan.monitor[kind] for kind in ("gradients", "parameters", "scalars")} == dict.fromkeys(
        ("gradients", "parameters", "scalars"), True
    )


@pytest.mark.parametrize(
    ("monitor", "passes"),
    [
        ({}, 4),  # values before and after the update, gradients before and after clipping
        ({"gradients": {"unclipped": False}}, 3),
        ({"parameters": {"every": 4}, "gradients": False}, 0.5),
        ({"optimizer_state": True}, 8),
    ],
)
def test_the_bytes_that_a_watched_step_reads_are_those_of_its_tensors(tmp_path, monitor, passes):
    probe = opened(tmp_path, {"level": "off", "monitor": {"activations": False, **monitor}, "audit": True})
    watched, audited = expected(probe)
    probe.close()
    assert watched.bytes == passes * 22_000 * 4
    assert audited.bytes == 8 * 22_000 * 4
    assert watched.seconds > 0


def test_the_line_states_milliseconds_and_bytes(tmp_path):
    probe = opened(tmp_path, default_plan())
    line = describe(probe)
    probe.close()
    told = re.search(
        r"costs about ([\d.e-]+) ms \(352 kB read\) for a watched step and about ([\d.e-]+) ms \(704 kB read\) for the audit",
        line,
    )
    assert told, line
    assert all(float(figure) > 0 for figure in told.groups())
    assert "watching gradients, parameters and scalars at every step; the audit (2 parameters on this rank)" in line


def test_a_loop_with_no_plan_has_the_bits_that_it_has_without_the_probe_and_is_audited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train(watched: bool, spoil: bool = False):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = attach(model, optimizer, on_existing="replace") if watched else None
        for step in range(4):
            if not (spoil and step == 1):
                optimizer.zero_grad()
            model(torch.randn(5, 100)).square().mean().backward()
            optimizer.step()
        found = [] if loop is None else [f for f in loop.findings if f.severity != "info"]
        if loop is not None:
            loop.close()
        state = [bits_of(t) for t in (*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values()))]
        return [*state, bits_of(torch.get_rng_state())], found

    torch.manual_seed(1)
    bare = train(False)
    assert train(True) == bare
    assert train(True, spoil=True)[1][0].rule == "cleared_gradients"
