"""Two fixtures for pytest, there wherever trainprobe is installed: `assert_healthy(run)` and `assert_same_run(a, b)`.

pytest imports this file at each start, so that it imports nothing of the package before a test calls one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trainprobe.watching import Probe


def assert_healthy(run: str | os.PathLike[str] | Probe) -> None:
    """Fail unless `trainprobe judge` finds nothing in a run, all of which it could read.

    run: the folder that it wrote to, or its probe once it is closed. Raises FormatError where there is no record.
    """
    __tracebackhide__ = True
    from trainprobe.monitor.judge_command import judged

    folder = _folder(run)
    answer = judged(folder)
    if answer.code:
        found = [one.finding for one in answer.findings if one.finding.severity != "info"]
        lines = [f"{f.severity} {f.rule}: {f.message}" for f in found]
        raise AssertionError("\n".join([f"{folder} is not healthy", *lines, *([answer.short] if answer.short else [])]))


def assert_same_run(
    a: str | os.PathLike[str] | Probe, b: str | os.PathLike[str] | Probe, *, within_rounding: bool = False
) -> None:
    """Fail unless `trainprobe dump-compare` calls two dumps identical.

    a, b: the folders that the runs wrote to, or their probes once they are closed. within_rounding: let differences pass that
    rounding explains. Raises FormatError where there is no dump.
    """
    __tracebackhide__ = True
    from trainprobe.dump_compare.command import compare_dumps

    _, verdict = compare_dumps(_folder(a), _folder(b), all_calls=False)
    if verdict.code > within_rounding:
        raise AssertionError("\n".join([f"{_folder(a)} and {_folder(b)}: {verdict.sentence}", *verdict.details]))


def _folder(run: str | os.PathLike[str] | Probe) -> Path:
    return Path(run) if isinstance(run, str | os.PathLike) else run.plan.output


@pytest.fixture(name="assert_healthy")
def _healthy() -> Callable[..., None]:
    return assert_healthy


@pytest.fixture(name="assert_same_run")
def _same_run() -> Callable[..., None]:
    return assert_same_run
