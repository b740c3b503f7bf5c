"""Small trainings under the audit: one with faults that the caller plants, and loops that bring their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainprobe
from benchmarks.bugs.loops import Loop
from benchmarks.bugs.published import Bug
from benchmarks.bugs.two_ranks import launch
from trainprobe.engine.core.records import Finding
from trainprobe.watching import Probe

PLAN = {"level": "off", "sinks": [], "audit": {"every": 1}}
Tamper = Callable[[str, int, nn.Module, torch.optim.Optimizer], None]


def nothing(when: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave the training as it is."""


def audited(folder: Path, tamper: Tamper = nothing, *, steps: int = 6, optimizer: str = "AdamW", **audit: Any) -> list[Finding]:
    """Train and return what the audit found. tamper is called at "begin", "backward", "update", "evaluate" and "end"."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 6))
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, stepper, level="off", audit={"every": 1, **audit}, output=folder / "out") as probe:
        for step in range(steps):
            tamper("begin", step, model, stepper)
            with probe.step():
                train_one(probe, model, stepper, lambda when, step=step: tamper(when, step, model, stepper))
            model.eval()
            tamper("evaluate", step, model, stepper)
            model(torch.ones(2, 6))
            model.train()
            tamper("end", step, model, stepper)
        probe.close()
        return [f for f in probe.findings if f.rule != "probe"]


def train_one(probe: Any, model: nn.Module, stepper: Any, tamper: Callable[[str], None]) -> None:
    """One step."""
    stepper.zero_grad()
    x = torch.randn(5, 6)
    probe.declare_loss(lambda m: m(x).square().mean())
    loss = model(x).square().mean()
    loss.backward()
    tamper("backward")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    tamper("update")
    stepper.step()
    probe.note("loss", loss.detach())
    probe.note("grad_norm", norm)


def findings(kind: type[Loop], folder: Path) -> list[Finding]:
    """Run a loop under the audit of every step; return what all its probes found: a loop that resumes has several."""
    probes: list[Probe] = []

    def probe_of(model: Any, optimizer: Any, place: Any) -> Probe:
        probes.append(Probe(PLAN, output=folder, on_existing="continue" if probes else "refuse").open(model, optimizer))
        return probes[-1]

    kind(0, 1, probe_of).run()
    probes[-1].close()
    return [f for probe in probes for f in probe.findings if f.severity != "info"]


def assert_found(bug: type[Loop], rule: str, name: str, folder: Path) -> None:
    """Hold that the first finding is of the step at which a bug begins, by this rule, and names this place."""
    first = findings(bug, folder / "out")[0]
    assert first.site is not None
    assert (first.rule, first.site.name, first.step) == (rule, name, bug.begins)


def assert_found_on_two_ranks(bugs: Iterable[Bug], expected: Mapping[str, tuple[str, str]]) -> None:
    """Hold the same of bugs by name, (rule, place), on both ranks, and that their twins raise no alarm."""
    chosen = [bug for bug in bugs if bug.name in expected]
    for rank in launch(chosen):
        for bug in chosen:
            first = next(f for f in rank[bug.name]["bug"]["findings"] if f["severity"] != "info")
            assert (first["rule"], first["site"][1]) == expected[bug.name], bug.name
            assert first["step"] == bug.run.begins, bug.name
            assert [f["message"] for f in rank[bug.name]["twin"]["findings"] if f["severity"] != "info"] == [], bug.name
