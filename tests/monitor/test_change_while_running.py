"""The interval, the patterns and the rules change while the run goes on, on all ranks at the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainprobe
from tests.distributed.launch import launch
from tests.lockstep import differences, train
from tests.zoo import load
from trainprobe.errors import PlanError

EVERYTHING = ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_a_file_changes_interval_and_patterns_on_both_ranks_at_the_same_step(tmp_path):
    """It is written within step 5 and looked at before each second one, so step 6 is the first."""
    launch(Path(__file__).with_name("change_on_ranks.py"), 2, str(tmp_path), timeout=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["seen"] == second["seen"]
    seen = {int(step): told for step, told in first["seen"].items()}
    assert list(seen) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 12, 15]
    assert all(seen[step] == ["monitor", "audit", *EVERYTHING] for step in range(6))
    assert [seen[step] for step in (6, 9, 12)] == [["monitor", "0.weight"]] * 3
    assert [seen[step][:2] for step in (10, 15)] == [["audit", *EVERYTHING[:1]], ["monitor", "audit"]]


def test_what_cannot_change_is_refused_on_both_ranks_and_the_run_goes_on(tmp_path):
    launch(Path(__file__).with_name("change_on_ranks.py"), 2, str(tmp_path), timeout=300)
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())["findings"]
        assert [f[:3] for f in told] == [["plan", "info", 6], ["plan", "warning", 12]]
        assert "sinks: while a run goes on, only step, monitor and audit can change" in told[1][3]


def run(folder, change, **plan):
    """Return step → names of parameters whose gradients were collected; `change(probe)` is called behind step 3."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-2), {}
    with trainprobe.watch(model, optimizer, output=folder, level="off", sinks=[], **plan) as probe:
        probe.watchers.append(
            lambda step_data: (
                seen.__setitem__(step_data.step, sorted(c.name for c in step_data.calls if "grad" in (c.params or {}))) or ()
            )
        )
        for step in range(9):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
            if step == 3:
                change(probe)
    return seen, probe


def test_a_program_changes_interval_patterns_and_rules_itself(tmp_path):
    def change(probe):
        probe.change(monitor={"step": "every 2", "gradients": {"names": ["1.**"]}, "rules": {"threshold": {"limit": 1e-9}}})

    seen, probe = run(tmp_path / "out", change, monitor={"activations": False})
    assert seen == {
        **dict.fromkeys(range(4), EVERYTHING),
        **{step: ["1.bias", "1.weight"] for step in (4, 6, 8)},
    }
    assert {f.step for f in probe.findings if f.rule == "threshold"} == {4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "L0"}, "level: while a run goes on, only step, monitor and audit can change"),
        ({"monitor": {"actions": {"dump_limit": 7}}}, "monitor.actions stays what it is, as alerts are set up at the start"),
        (
            {"audit": True},
            r"neither begin nor end: have it in the plan from the start, at few steps \(`monitor: {step: \[0\]}`",
        ),
        ({"monitor": {"gradient": {}}}, "did you mean"),
    ],
)
def test_what_cannot_change_is_an_error_and_changes_nothing(tmp_path, fields, message):
    def change(probe):
        with pytest.raises(PlanError, match=message):
            probe.change(**fields)

    assert run(tmp_path / "out", change, monitor={"activations": False})[0] == dict.fromkeys(range(9), EVERYTHING)


EVERY_KIND = {
    "activations": True,
    "activation_gradients": {"names": ["1"]},
    "parameters": True,
    "gradients": {"unreduced": True, "unclipped": True},
    "optimizer_state": True,
    "update": True,
    "batches": True,
    "features": {"dead_units": {"names": ["1"]}, "weights": {"names": ["0.weight"], "every": 2}},
}
NO_KIND = {**dict.fromkeys(EVERY_KIND, False), "features": {"dead_units": False, "weights": False}}


def records_of(folder, change, **collected):
    """Train with momentum and clipping; `change(probe)` is called behind step 3. Return step → records."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), {}
    with trainprobe.watch(model, optimizer, output=folder, level="off", sinks=[], monitor=collected) as probe:
        probe.watchers.append(lambda step_data: told.__setitem__(step_data.step, {}) or ())
        probe.watchers.append(
            lambda step_data: (
                told[step_data.step].update({(r.step, r.site): (r.dtype, r.shape, r.values) for r in step_data.records()}) or ()
            )
        )
        for step in range(9):
            with probe.step(step):
                optimizer.zero_grad()
                for _ in range(2):
                    model(torch.randn(3, 4)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if step == 3:
                change(probe)
        assert probe.findings == []
    return told


def test_kinds_that_were_off_at_the_start_are_switched_on_and_tell_the_same_numbers(tmp_path):
    """The oracle is a run that had them from the start, whose spectra, each second step, fall on the same steps."""
    always = records_of(tmp_path / "a", lambda probe: None, **EVERY_KIND)
    later = records_of(tmp_path / "b", lambda probe: probe.change(monitor=EVERY_KIND), **NO_KIND)
    assert {site.kind for step in range(4) for _, site in later[step]} == {"scalar"}
    slots = {(site.kind, site.slot.split(".")[0]) for _, site in later[4]}
    assert slots >= {
        *(("module", slot) for slot in ("input", "output", "grad_output", "grad_input")),
        *(("parameter", slot) for slot in ("value", "grad", "grad_unreduced", "grad_unclipped", "momentum_buffer", "update")),
        *(("feature", slot) for slot in ("fingerprint", "dead_units", "spectral_norm")),
    }
    for step in range(4, 9):
        assert later[step].keys() == always[step].keys()
        for place, (dtype, shape, values) in later[step].items():
            close = (
                1e-3 if place[1].slot in ("spectral_norm", "stable_rank") else 0
            )  # an iteration that begins at another place
            assert (dtype, shape, values) == (
                *always[step][place][:2],
                pytest.approx(always[step][place][2], rel=close, abs=0),
            ), place


def test_kinds_that_were_on_are_switched_off_and_cost_nothing_more(tmp_path):
    own = torch.nn.Module._call_impl
    told = records_of(tmp_path, lambda probe: probe.change(monitor=NO_KIND), **EVERY_KIND)
    assert {site.kind for _, site in told[3]} == {"module", "parameter", "feature", "scalar"}
    assert {site.kind for step in range(4, 9) for _, site in told[step]} == {"scalar"}
    assert torch.nn.Module._call_impl is own


def test_patterns_of_activations_change(tmp_path):
    def change(probe):
        probe.change(monitor={"activations": {"names": ["2"]}, "activation_gradients": {"names": ["0"]}})

    told = records_of(tmp_path, change, activations={"names": ["0"]}, activation_gradients={"names": ["2"]})
    sides = [{(site.name, site.slot.startswith("grad")) for _, site in told[step] if site.kind == "module"} for step in (3, 4)]
    assert sides == [{("0", False), ("2", True)}, {("2", False), ("0", True)}]


def test_a_training_whose_plan_changes_has_the_bits_of_one_without_the_probe(tmp_path):
    case = load("residual_gpt")

    def watch(model, optimizer):
        watched = trainprobe.watch(model, optimizer, level="off", sinks=[], monitor=True, output=tmp_path / "out", control=1)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "control.yaml").write_text("monitor: {step: every 2}\n")
        return watched

    assert differences(train(case), train(case, watch=watch)) == []
