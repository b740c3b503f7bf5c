"""Two monitor runs on one page: the first step and series that leave the floor; two healthy runs have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.cli import main

CHANGED = 6  # the step whose update is another


def trained(folder, *, change=False, threads=1, steps=10, **monitor) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        plan = {
            "output": str(folder),
            "record": "L0",
            "monitor": {"gradients": True, "parameters": True, **monitor},
            "console": False,
        }
        with trainprobe.watch(model, optimizer, plan=plan) as probe:
            for step in range(steps):
                x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
                with probe.step():
                    loss = model(x).square().mean()
                    probe.note("loss", loss.item())
                    optimizer.zero_grad()
                    loss.backward()
                    if change and step == CHANGED:
                        model[2].weight.grad.mul_(1.01)
                    optimizer.step()
        return str(folder)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "healthy": trained(folder / "healthy"),
        "threads": trained(folder / "threads", threads=2),
        "repeat": trained(folder / "repeat", threads=2),
        "changed": trained(folder / "changed", change=True, threads=2),
    }


def test_the_first_step_and_series_that_leave_the_floor_are_named(runs, tmp_path, capsys):
    page = tmp_path / "page.html"
    for floor in ([], ["--floor", runs["threads"]]):
        assert main(["report", runs["healthy"], "--beside", runs["changed"], *floor, "-o", str(page)]) == 0
        said = capsys.readouterr().out
        assert f"from step {CHANGED} on, 2.weight grad norm" in said
        assert ("measured by a third run" in said) == bool(floor)
    browser = Browser(require_chromium())
    try:
        browser.open(page)
        shown = browser.run("document.body.innerText")
        browser.screenshot(tmp_path / "page.png")
    finally:
        browser.close()
    assert browser.errors == []
    assert f"from step {CHANGED} on, 2.weight grad norm" in shown
    assert "What leaves the floor first" in shown
    assert "loss, changed" in shown


def test_runs_that_differ_by_rounding_have_no_such_step(runs, tmp_path, capsys):
    for other, floor in (("threads", []), ("threads", ["--floor", runs["repeat"]]), ("healthy", [])):
        assert main(["report", runs["healthy"], "--beside", runs[other], *floor, "-o", str(tmp_path / "page.html")]) == 0
        assert "by more than rounding explains" in capsys.readouterr().out


def test_what_one_run_alone_holds_is_told_and_nothing_in_common_is_no_agreement(runs, tmp_path, capsys):
    less = trained(tmp_path / "less", steps=8, parameters=False)
    for a, b, alone in ((runs["healthy"], less, "this run"), (less, runs["healthy"], "healthy")):
        assert main(["report", a, "--beside", b, "-o", str(tmp_path / "page.html")]) == 0
        said = capsys.readouterr().out
        assert "by more than rounding explains" in said
        assert f"not compared, as {alone} alone has them: 6 series (such as 0.bias value_after norm), steps 8, 9" in said
        assert f"as {alone} alone has them" in (tmp_path / "page.html").read_text()
    other = tmp_path / "other"
    with trainprobe.watch(
        nn.Identity(), plan={"output": str(other), "record": "L0", "monitor": True, "console": False}
    ) as probe:
        for step in range(4):
            with probe.step():
                probe.note("reward", float(step))
    assert main(["report", less, "--beside", str(other), "-o", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "nothing was compared: no series of this run is in other" in said
    assert "by more than rounding explains" not in said


def test_a_floor_needs_another_run(runs, tmp_path, capsys):
    assert main(["report", runs["healthy"], "--floor", runs["threads"]]) != 0
    assert "--floor needs --beside" in capsys.readouterr().err
