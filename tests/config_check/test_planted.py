"""The bench of planted differences: its cases can be planted, and some of them are run here from end to end."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.config_bench.case import Case
from benchmarks.config_bench.harmless import HARMLESS
from benchmarks.config_bench.planted import PLANTED
from benchmarks.config_bench.runner import judge, prepare
from tests.config_check.launch import run

ALL = {case.name: case for case in (*PLANTED, *HARMLESS)}
RUN = ("order of lines", "autocast dtype", "clipping", "activation", "variable that the script reads", "compiled")
QUIET = ("formatting", "more log output")


def test_there_are_sixty_differences_and_ten_harmless_pairs():
    assert len(PLANTED) >= 60 and len(HARMLESS) >= 10
    assert len(ALL) == len(PLANTED) + len(HARMLESS)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_every_case_can_be_planted_and_only_a_line_that_names_it_counts(case: Case, tmp_path):
    prepare(tmp_path / "run", (*case.base, *case.edits))
    for line in ("no difference found: everything that was captured is the same", "29 of 30 weights differ from the start"):
        assert not case.names or case.name == "initial deviation" or not re.search(case.names, line)
    assert judge(case, 0, "no difference found") == ("missed" if case.names else "quiet")


@pytest.mark.slow
def test_planted_differences_are_named_in_the_first_line_of_the_real_command(tmp_path):
    words = [word for name in (*RUN, *QUIET) for word in ("--only", name)]
    found = tmp_path / "found.json"
    run("-m", "benchmarks.config_bench", "--fork", "--json", found, *words, timeout=900)
    verdicts = {result["case"]: result for result in json.loads(found.read_text())}
    assert verdicts.keys() == {*RUN, *QUIET}
    assert {name: v for name, v in verdicts.items() if v["verdict"] not in ("named", "beside", "quiet")} == {}
