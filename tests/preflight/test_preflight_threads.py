"""Faults of public threads: the property breaks, its factor is named, and the healthy twin holds."""

from __future__ import annotations

import pytest

import trainprobe
from benchmarks.preflight.threads import THREADS


def test_there_are_twelve():
    assert len({case.name for case in THREADS}) == 12


@pytest.mark.parametrize("case", THREADS, ids=lambda case: case.name)
def test_the_factor_of_a_thread_is_named(case):
    for broken in (True, False):
        trial = case.make(broken)
        report = trainprobe.preflight(
            trial.loss, trial.model, trial.batch, only=[case.broken], seconds=600, **trial.options
        )  # fmt: skip
        (line,) = report.lines
        assert line.status == ("BROKEN" if broken else "holds"), line
        assert not broken or case.place in line.text, line
