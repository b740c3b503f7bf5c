"""`trainprobe self-test`, whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.gpu.machine import Machine
from trainprobe.self_test.command import run_child


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a line a check."""
    with TemporaryDirectory() as folder:
        results = run_child(
            machine.device, machine.rehearse, Path(folder), 80 if not machine.rehearse else 500, Console(quiet=True)
        )
        (machine.output / "self_test.log").write_bytes((Path(folder) / "log.txt").read_bytes()[-(1 << 20) :])
    for result in results:
        yield {"figure": "self-test", **asdict(result), "met": result.outcome != "FAIL"}
