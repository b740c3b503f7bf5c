"""Programs that nobody here wrote keep their bits under trainprobe, are counted right, and get no false finding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.catalog import PROGRAMS, Program
from tests.foreign.running import run

ASKED = os.environ["TRAINPROBE_FOREIGN"]  # "quick", "all", or a program with an environment of its own
CHOSEN = [p for p in PROGRAMS if (p.name == ASKED if p.own or ASKED not in {"quick", "all"} else p.quick or ASKED == "all")]


def _parameter(program: Program) -> Any:
    amiss = [pytest.mark.xfail(reason=program.amiss, strict=True, raises=AssertionError)] if program.amiss else []
    return pytest.param(program, id=program.name, marks=amiss)


@pytest.mark.parametrize("program", list(map(_parameter, CHOSEN)))
@pytest.mark.timeout(2000)
def test_a_program_is_watched_without_a_change_and_without_a_false_word(program: Program, tmp_path: Path) -> None:
    result = run(program, tmp_path)
    output = (tmp_path / "watched" / "output.txt").read_text(errors="replace")
    assert result.codes == (0, 0), output[-3000:]
    assert result.difference == ""
    assert result.updates == program.updates
    assert result.losses > 0
    assert _unexpected(program, result.findings) == []
    assert result.warnings == []
    assert result.steps == program.recorded
    assert result.ending, "nothing was said at the end"


def _unexpected(program: Program, findings: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [f for f in findings if not any(rule == f[0] and words in f[2] for rule, words, _ in program.findings)]
