"""`trainprobe self-test`: quick, and then whole as far as there is time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.machine import Machine
from trainprobe.self_test.command import results_of

SECONDS = 85


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a line a check as it ends."""
    end = time.monotonic() + (SECONDS if not machine.rehearse else 500)
    for how in ("quick",) if machine.rehearse else ("quick", "whole"):
        with TemporaryDirectory() as folder:
            for result in results_of(machine.device, how == "quick", Path(folder), end - time.monotonic()):
                yield {"figure": "self-test", "how": how, **asdict(result), "met": result.outcome != "FAIL"}
            (machine.output / f"self_test_{how}.log").write_bytes((Path(folder) / "log.txt").read_bytes()[-(1 << 20) :])
