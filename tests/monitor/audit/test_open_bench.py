"""The harness of the open bench: a bug and its twin run under the default plan, and a finding becomes a line."""

import json

from benchmarks.bugs.__main__ import lines_of
from benchmarks.bugs.open_bench.bug import OpenBug
from benchmarks.bugs.open_bench.catalogue import OPEN
from benchmarks.bugs.open_bench.judge import judged


def finding(rule, step, name, severity="error"):
    """Return a finding as the worker writes it."""
    return {
        "rule": rule,
        "severity": severity,
        "message": f"{name} is wrong",
        "step": step,
        "site": ["parameter", name, "grad"],
    }


def test_one_bug_and_its_twin_run_and_give_a_line(capfd):
    (line,) = lines_of("open", "default", ["zero_grad_per_epoch"])
    assert line["bug"] == "zero_grad_per_epoch" and not line["faults"] and line["seconds"] > 0
    assert isinstance(line["detected"], bool) and json.dumps(line)


def test_an_alarm_that_the_twin_has_too_or_that_comes_early_does_not_count():
    bug = OpenBug("b", "data", "", lambda bug, watch: None, 5, r"net\..*")
    twin = {"findings": [finding("lr", 10, "lr")], "seconds": 1.0}
    run = {"findings": [finding("flow", 4, "net.a"), finding("lr", 20, "lr")], "seconds": 1.0}
    line = judged(bug, [{"": twin, "b": run}])
    assert not line["detected"] and line["alarms"] == 1
    run["findings"] += [finding("late", 30, "net.c"), finding("flow", 10, "net.b"), finding("note", 6, "net.d", "info")]
    line = judged(bug, [{"": twin, "b": run}])
    assert line["detected"] and line["located"] and line["named"] == "flow: net.b" and line["steps"] == 6
    bug = OpenBug("b", "data", "", lambda bug, watch: None, 5, r"batch", says="is wrong")
    assert judged(bug, [{"": twin, "b": run}])["located"]


def test_every_bug_has_a_name_of_its_own_and_a_public_source():
    assert len({bug.name for bug in OPEN}) == len(OPEN) >= 40
    assert all(bug.source.count("/") == 1 and "#" in bug.source for bug in OPEN)
