"""The keywords that editors complete are the fields of a plan, and type checkers accept what the plan accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from trainprobe.engine.plan.fields import PlanFields
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.subplans import sections

ROOT = Path(__file__).parents[3]
GOOD = """
import torch, trainprobe
model = torch.nn.Linear(2, 2)
with trainprobe.watch(model, None, record="mix", step=[0, "every 10"], sinks="dump", monitor={"gradients": True}) as probe:
    with probe.step():
        probe.note("loss", 1.0)
with trainprobe.watch(model, plan="plan.yaml", console=False, quantiles=(0.1, 0.9), details=[{"match": "a"}]) as probe:
    pass
"""
BAD = """
import torch, trainprobe
with trainprobe.watch(torch.nn.Linear(2, 2), levle="mix") as probe:
    pass
with trainprobe.watch(torch.nn.Linear(2, 2), record="L3") as probe:
    pass
"""


def choices(hint: Any) -> set[Any]:
    """Return the literals within an annotation."""
    found = {argument for argument in get_args(hint) if isinstance(argument, str)} if get_origin(hint) is Literal else set()
    return found.union(*(choices(argument) for argument in get_args(hint)))


def test_the_keywords_are_the_fields_of_a_plan_in_their_order():
    told = list(get_type_hints(PlanFields))
    assert told == [name for name in Plan.model_fields if name in told]
    assert set(Plan.model_fields) - set(told) <= sections().keys()  # a program may leave its section to mappings


@pytest.mark.parametrize("name", get_type_hints(PlanFields))
def test_a_keyword_has_the_choices_of_its_field(name):
    told, held = choices(get_type_hints(PlanFields)[name]), choices(Plan.model_fields[name].annotation)
    assert told == held or (not told and name == "statistics")  # of which a plan takes patterns


def checked(checker: str, text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    words = {"mypy": ["-m", "mypy", "--follow-imports=silent"], "pyright": ["-m", "pyright", "--pythonpath", sys.executable]}
    return subprocess.run(
        [sys.executable, *words[checker], str(program)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_accepts_good_keywords_and_names_bad_ones(checker, tmp_path):
    good, bad = checked(checker, GOOD, tmp_path), checked(checker, BAD, tmp_path)
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1 and "levle" in bad.stdout and "L3" in bad.stdout, bad.stdout
