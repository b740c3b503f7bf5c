"""A loss scale is taken out of what the probe tells: the numbers are those of the same training without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.lockstep import bits_of
from trainprobe.engine.core.unscaling import divided
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.integrations.torch_loop import attach
from trainprobe.monitor.run_folder import read_frames
from trainprobe.watching import Probe, watch

PLAN = {"level": "off", "sinks": [], "monitor": {"gradients": {"unreduced": True}, "activations": False}, "audit": {"every": 1}}
SCALE, STEPS = 2.0**12, 5
GRADIENTS = ("grad_unreduced", "grad_unclipped", "grad")


def train(folder, scaler, *, clip="unscaled", overflow=None, fused=False):
    """Train in float32; return (step, name, slot) → (norm, max, min, scale), the scalars of steps, findings and final bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    rows, scalars = {}, {}

    def see(step_data):
        numbers = finish(step_data.partials, ("norm", "max", "min"))
        scalars[step_data.step] = dict(step_data.scalars)
        for call in step_data.calls:
            for slot, value in (call.params or {}).items() if call.kind == "state" else ():
                told = [float(numbers[k][value.row]) for k in ("norm", "max", "min")]
                rows[step_data.step, call.name, slot] = (*told, (value.extra or {}).get("scale", 1.0))
        return ()

    probe = Probe(PLAN, output=folder).open(model, optimizer)
    probe.watchers.append(see)
    for step in range(STEPS):
        with probe.step(step):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(4, 5)).square().mean()
                loss = loss * float("inf") if step == overflow else loss
                (scaler.scale(loss) if scaler else loss).backward()
            if scaler and clip == "unscaled":
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    probe.close()
    bits = [bits_of(p) for p in model.parameters()]
    return rows, scalars, probe.findings, bits


def scaler(**settings):
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2, **settings)


@pytest.mark.parametrize("clip", ["unscaled", None])
@pytest.mark.parametrize("fused", [False, True])
def test_every_gradient_has_the_numbers_of_the_training_without_a_scale(tmp_path, clip, fused):
    """The scales are powers of two, so nothing is rounded: the numbers are equal, at all moments."""
    plain, _, _, plain_bits = train(tmp_path / "plain", None, clip=clip, fused=fused)
    scaled, scalars, findings, scaled_bits = train(tmp_path / "scaled", scaler(), clip=clip, fused=fused)
    assert {key: row[:3] for key, row in scaled.items()} == {key: row[:3] for key, row in plain.items()}
    assert scaled_bits == plain_bits
    assert {slot for _, _, slot in scaled} >= {slot for slot in GRADIENTS if clip or slot != "grad_unclipped"}
    in_use = [SCALE, SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]
    assert [scalars[step]["loss_scale"] for step in range(STEPS)] == in_use
    assert {row[3] for key, row in scaled.items() if key[2] == "grad_unreduced"} == set(in_use)
    assert [f.message for f in findings if f.severity != "info"] == []


def test_clipping_that_forgets_to_unscale_is_found_by_the_norm_that_it_reports(tmp_path):
    """The gradients are told as they are without the scale, and the norm as the clipping found it."""
    findings = train(tmp_path / "out", scaler(), clip="scaled")[2]
    found = next(f for f in findings if f.rule == "gradient_norm")
    assert found.measured == pytest.approx(found.expected * SCALE, rel=1e-5)


def test_a_step_that_overflows_has_the_scale_that_was_in_use_and_is_no_alarm(tmp_path):
    _, scalars, findings, _ = train(tmp_path / "out", scaler(), overflow=1)
    assert [scalars[step]["loss_scale"] for step in range(3)] == [SCALE, SCALE, SCALE / 2]
    assert [f for f in findings if f.rule in ("gradient_norm", "spike")] == []


def test_a_loop_that_is_followed_tells_the_scale_of_each_step_and_not_that_of_the_next(tmp_path):
    torch.manual_seed(0)
    model, scalars = nn.Linear(5, 1), {}
    optimizer, scaling = torch.optim.SGD(model.parameters(), lr=1e-2), scaler()
    loop = attach(model, optimizer, {**PLAN, "audit": None}, output=tmp_path / "out")
    loop.session.probe.watchers.append(lambda step_data: scalars.__setitem__(step_data.step, dict(step_data.scalars)) or ())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5)).square().mean() * (float("inf") if step == 1 else 1.0)
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
    loop.close()
    assert [scalars[step]["loss_scale"] for step in range(4)] == [SCALE, SCALE, SCALE / 2, SCALE / 2]


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 2.0**-3])
def test_divided_partials_are_those_of_the_divided_tensor(scale):
    x = np.random.default_rng(0).normal(size=1000)
    x[:3] = 0.0

    def partials(a):
        row = dict.fromkeys(PARTIALS, 0.0) | {"count": a.size, "zero": (a == 0).sum(), "min": a.min(), "max": a.max()}
        row |= {"sum": a.sum(), "sumsq": (a * a).sum(), "m2": ((a - a.mean()) ** 2).sum()}
        return np.array([[row[name] for name in PARTIALS]], dtype=np.float64)

    told = finish(divided(partials(x * scale), np.array([scale])), ("norm", "mean", "max", "min", "std"))
    for name, value in finish(partials(x), ("norm", "mean", "max", "min", "std")).items():
        assert told[name] == pytest.approx(value, rel=1e-12)


def test_gradients_that_a_dump_shows_with_the_scale_are_another_series_for_the_rules(tmp_path):
    """At a level that records calls, the gradient that a call shows is multiplied, and that of the optimizer is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer, scaling = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=SCALE)
    with watch(model, optimizer, output=tmp_path / "out", record="L0", sinks=["parquet"], monitor=True) as probe:
        for step in range(30):
            with probe.step(step):
                loss = model(torch.randn(16, 8)).square().mean()
                loss = loss * float("inf") if step == 20 else loss
                optimizer.zero_grad()
                scaling.scale(loss).backward()
                scaling.step(optimizer)
                scaling.update()
    assert [f.message for f in probe.findings if f.rule == "spike"] == []
    frames = list(read_frames(tmp_path / "out"))
    norms = {s: [] for s in ("grad", "grad_scaled")}
    for frame in frames:
        for number, x in zip(frame.at.tolist(), frame.values.tolist(), strict=True):
            series = frame.table.series[number]
            if series.address.name == "0.weight" and series.statistic == "norm" and series.address.slot in norms:
                norms[series.address.slot].append(x / (frame.scalars["loss_scale"] if "scaled" in series.address.slot else 1))
    assert len(norms["grad_scaled"]) == 30 and len(norms["grad"]) == 29
    np.testing.assert_allclose(norms["grad"], np.delete(norms["grad_scaled"], 20))
