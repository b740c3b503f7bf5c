"""Run the bench: `python -m benchmarks.preflight [NAME ...]`. One line a case, the figures at the end.

found: any property is BROKEN in the case with the fault. named: the property of the case is the first that is BROKEN, with the
place that the case asks for. alarm: a property is BROKEN in the healthy twin.
"""

from __future__ import annotations

import sys

import torch

import trainprobe
from benchmarks.preflight.case import Case, Trial
from benchmarks.preflight.catalogue import CASES
from benchmarks.preflight.healthy import HEALTHY


def told(trial: Trial) -> list[tuple[str, str]]:
    """Return property → sentence of what is broken, in the order of the report."""
    report = trainprobe.preflight(trial.loss, trial.model, trial.batch, **{"seconds": 600, **trial.options})
    return [(line.name, line.text) for line in report.lines if line.status == "BROKEN"]


def judged(case: Case) -> tuple[bool, bool, bool]:
    """Return whether a case is found, named first and alarmed in its twin; print its line."""
    broken, healthy = told(case.make(True)), told(case.make(False))
    first = broken[0] if broken else ("", "")
    named = first[0] == case.broken and case.place in first[1]
    sys.stdout.write(f"{'named ' if named else 'found ' if broken else 'MISSED'} {case.name} ({case.broken}): {first[1]}\n")
    for name, text in healthy:
        sys.stdout.write(f"       ALARM in its twin: {name}: {text}\n")
    return bool(broken), named, bool(healthy)


def main(names: list[str]) -> None:
    """Run the cases of these names, all without any."""
    torch.set_num_threads(1)
    results = [judged(case) for case in CASES if not names or case.name in names]
    found, named, alarms = (sum(column) for column in zip(*results, strict=True)) if results else (0, 0, 0)
    for name, make in HEALTHY.items():
        if not names or name in names:
            broken = told(make())
            alarms += bool(broken)
            sys.stdout.write(f"{'ALARM ' if broken else 'quiet '} {name} {broken or ''}\n")
    sys.stdout.write(f"{len(results)} faults: {found} found, {named} named first; healthy programs with an alarm: {alarms}\n")


main(sys.argv[1:])
