"""Runs the open bench, and judges what was found of each bug and on its twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bugs.open_bench.bug import OpenBug

ALARMS = ("warning", "error")
Line = dict[str, Any]


def alarms(findings: list[Line]) -> list[Line]:
    """Return what a user is warned of; faults of the probe itself are counted elsewhere."""
    return [f for f in findings if f["severity"] in ALARMS and f["rule"] != "probe"]


def judged(bug: OpenBug, ranks: list[Line]) -> Line:
    """Put what all ranks found of a bug and of its twin into one line.

    Found: an alarm at or behind the step at which the bug begins that its twin does not have too (same rule, same place).
    """
    twin = [f for rank in ranks for f in alarms(rank[""]["findings"])]
    known = {(f["rule"], _place(f)) for f in twin}
    runs = [f for rank in ranks for f in rank[bug.name]["findings"]]
    new = [f for f in alarms(runs) if (f["rule"], _place(f)) not in known]
    new = sorted((f for f in new if f["step"] is None or f["step"] >= bug.begins), key=_step)
    first = new[0] if new else None
    return {
        "bug": bug.name,
        "family": bug.family,
        "source": bug.source,
        "program": bug.program.__name__,
        "detected": first is not None,
        "steps": None if first is None or first["step"] is None else first["step"] - bug.begins + 1,
        "located": first is not None and bug.located(first),
        "named": "" if first is None else f"{first['rule']}: {_place(first)}",
        "alarms": len(twin),
        "faults": [f["message"] for f in runs if f["rule"] == "probe" and f["severity"] in ALARMS],
        "why": [_told(f) for f in new] + [f"ALARM {_told(f)}" for f in twin],
        "seconds": sum(rank[bug.name]["seconds"] for rank in ranks),
    }


def _told(finding: Line) -> str:
    return f"{finding['rule']}: {_place(finding)} (step {finding['step']}): {finding['message']}"


def _place(finding: Line) -> str:
    return finding["site"][1] if finding["site"] else ""


def _step(finding: Line) -> int:
    return 1 << 30 if finding["step"] is None else finding["step"]


def run(bugs: Iterable[OpenBug], plan: str, timeout: float = 1500) -> list[Line]:
    """Run bugs and return a line for each, in their order. Raises RuntimeError when a program fails."""
    bugs = list(bugs)
    with tempfile.TemporaryDirectory(prefix="trainprobe_open_") as folder:
        for ranks in sorted({bug.ranks for bug in bugs}):
            _launch([bug for bug in bugs if bug.ranks == ranks], ranks, plan, Path(folder), timeout)
        return [judged(bug, _results(bug, Path(folder))) for bug in bugs]


def _results(bug: OpenBug, folder: Path) -> list[Line]:
    name = bug.program.__name__
    if broken := [path.read_text() for path in folder.glob(f"{name}.*.error")]:
        raise RuntimeError(f"{name} failed:\n" + "\n".join(broken))
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(bug.ranks)]


def _launch(bugs: list[OpenBug], ranks: int, plan: str, folder: Path, timeout: float) -> None:
    """Run bugs that need so many ranks, and leave what was found in a folder."""
    shared = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bugs.open_bench.worker", plan, str(folder)]
    running: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        own = {**os.environ, **shared, **(place if ranks > 1 else {})}
        with (folder / f"{ranks}.{rank}.log").open("w") as log:
            running.append(
                subprocess.Popen([*command, *(bug.name for bug in bugs)], env=own, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for process in running:
            process.wait(timeout)
    finally:
        for process in running:
            process.kill()
