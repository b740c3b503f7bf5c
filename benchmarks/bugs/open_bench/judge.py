"""Runs the open bench, each program in processes of its own, and judges what was found of each bug and on its twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.bugs.open_bench.bug import OpenBug
from tests.distributed.launch import free_port

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
        "found": first is not None,
        "step": None if first is None else first["step"],
        "named": first is not None and bug.located(first),
        "first": "" if first is None else f"{first['rule']}: {_place(first)}",
        "message": "" if first is None else first["message"],
        "later": [f"{f['rule']}: {_place(f)} (step {f['step']})" for f in new[1:]],
        "twin": [f"{f['rule']}: {_place(f)} (step {f['step']}): {f['message']}" for f in twin],
        "faults": [f["message"] for f in runs if f["rule"] == "probe" and f["severity"] in ALARMS],
        "seconds": sum(rank[bug.name]["seconds"] for rank in ranks),
    }


def _place(finding: Line) -> str:
    return finding["site"][1] if finding["site"] else ""


def _step(finding: Line) -> int:
    return 1 << 30 if finding["step"] is None else finding["step"]


def run(bugs: Iterable[OpenBug], plan: str, timeout: float = 1500) -> Iterator[Line]:
    """Run bugs program by program, and yield a line for each. A program that fails yields lines that say so."""
    ordered = sorted(bugs, key=lambda bug: bug.program.__name__)
    for _name, group in groupby(ordered, key=lambda bug: bug.program.__name__):
        together = list(group)
        try:
            ranks = _launch(together, plan, timeout)
        except RuntimeError as error:
            yield from ({"bug": bug.name, "family": bug.family, "source": bug.source, "failed": str(error)} for bug in together)
        else:
            yield from (judged(bug, ranks) for bug in together)


def _launch(bugs: list[OpenBug], plan: str, timeout: float) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="trainprobe_open_") as folder:
        count = bugs[0].ranks
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
        if count == 1 and bugs[0].program.__name__ != "engine":  # as without a launcher
            environment = {k: v for k, v in environment.items() if k not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        running: list[tuple[Any, Path, Path]] = []
        for rank in range(count):
            result, log = Path(folder) / f"{rank}.json", Path(folder) / f"{rank}.log"
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bugs.open_bench.worker", plan, str(result)]
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in environment else environment
            process = subprocess.Popen(
                [*command, *(bug.name for bug in bugs)], env=own, stdout=log.open("w"), stderr=subprocess.STDOUT
            )
            running.append((process, result, log))
        try:
            for process, _result, _log in running:
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process, _result, _log in running:
                process.kill()
        broken = [log.read_text()[-3000:] for process, result, log in running if process.wait() or not result.exists()]
        if broken:
            raise RuntimeError("\n".join(broken))
        return [json.loads(result.read_text()) for _process, result, _log in running]
