"""What `make test` leaves out of a matrix: never a value, and it says how many cases and how to run them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.matrices import EXHAUSTIVE, cover, covered, matrix

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).with_name("conftest.py")
MATRIX = """
import pytest
from tests.matrices import matrix

@pytest.mark.parametrize(("a", "b"), matrix("xyz", (1, 2)))
def test_it(a, b):
    pass
"""
PROOF = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.proves("PyTorch", "what only this test proves")
def test_it():
    pass
"""


@pytest.mark.parametrize("columns", [("ab", "xyz"), ("abcd", "xy", "12"), ("a",)])
def test_each_value_of_each_column_occurs(columns):
    cases = list(product(*columns))
    kept = [cases[number] for number in cover([list(enumerate(case)) for case in cases])]
    assert [set(column) for column in zip(*kept, strict=True)] == [set(column) for column in columns]
    assert len(kept) == max(map(len, columns))


def test_values_of_a_column_that_is_full_are_spread_evenly():
    kept = [case.values for case in matrix(range(30), "abc") if not case.marks]
    assert {letter: sum(case[1] == letter for case in kept) for letter in "abc"} == dict.fromkeys("abc", 10)


def test_cases_are_kept_for_what_is_said_of_them():
    cases = ["ddp lr", "ddp seed", "fsdp lr", "fsdp seed", "fsdp order"]
    kept = [case.values[0] for case in covered(cases, str.split) if not case.marks]
    assert kept == ["ddp lr", "fsdp seed", "fsdp order"]


@pytest.fixture
def run(pytester, monkeypatch):
    """Return what runs tests under this project's conftest, without the exhaustive cases."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makefile(".ini", pytest="[pytest]\nmarkers = exhaustive\n proves\n slow\n")
    monkeypatch.setenv("TRAINPROBE_PROOFS", str(pytester.path))
    monkeypatch.setenv("PYTHONPATH", str(CONFTEST.parents[1]))
    monkeypatch.delenv(EXHAUSTIVE, raising=False)
    return pytester.runpytest_subprocess


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_what_is_left_out_is_counted_and_told(pytester, run, monkeypatch, workers):
    pytester.makepyfile(MATRIX)
    done = run(*workers)
    assert done.parseoutcomes()["passed"] == 3
    done.stdout.fnmatch_lines(["3 exhaustive cases were left out: run them with `make test-all`*"])
    monkeypatch.setenv(EXHAUSTIVE, "1")
    done = run(*workers)
    assert done.parseoutcomes()["passed"] == 6
    done.stdout.no_fnmatch_line("*left out*")


def test_what_alone_proves_a_row_of_the_support_table_is_run(pytester, run):
    pytester.makepyfile(PROOF)
    assert run().parseoutcomes() == {"passed": 1}
