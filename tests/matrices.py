"""Which cases of a matrix `make test` runs: enough that each value of each parameter occurs. `make test-all` runs every case.

    @pytest.mark.parametrize(("name", "level"), matrix(NAMES, LEVELS))                   # the product of the columns
    @pytest.mark.parametrize("case", covered(CASES, lambda case: (case.program, case.rule)))  # cases, what is in each

The others carry the marker `exhaustive`, which tests/conftest.py leaves out unless TRAINPROBE_EXHAUSTIVE is 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from itertools import product
from typing import Any

import pytest

EXHAUSTIVE = "TRAINPROBE_EXHAUSTIVE"


def all_cases() -> bool:
    """Return whether this run takes every case."""
    return os.environ.get(EXHAUSTIVE, "0") not in ("", "0")


def examples(count: int) -> int:
    """Return how many examples Hypothesis makes in this run, of so many where every case is taken."""
    return count if all_cases() else max(20, count // 4)


def matrix(*columns: Iterable[Any]) -> list[Any]:
    """Return the product of columns as parameters; of these, each value of each column occurs in a case that is always run."""
    cases = list(product(*map(list, columns)))
    return _marked(cases, [[(column, repr(value)) for column, value in enumerate(case)] for case in cases])


def covered(cases: Iterable[Any], values: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return the cases as parameters; each value that `values` tells of a case occurs in a case that is always run."""
    cases = list(cases)
    return _marked([(case,) for case in cases], [list(values(case)) for case in cases])


def _marked(cases: list[tuple[Any, ...]], values: list[list[Hashable]]) -> list[Any]:
    kept = set(cover(values))
    return [
        pytest.param(*case, marks=() if number in kept else pytest.mark.exhaustive, id=None)
        for number, case in enumerate(cases)
    ]


def cover(cases: list[list[Hashable]]) -> list[int]:
    """Return numbers of cases that have all values between them: always the one with the most values that are still missing.

    Where several have as many, it is the one whose values were taken least often, and of these the first.
    """
    missing = {value for case in cases for value in case}
    taken = dict.fromkeys(missing, 0)
    found: list[int] = []
    while missing:
        best = max(
            (number for number in range(len(cases)) if number not in found),
            key=lambda number: (len(missing & set(cases[number])), -sum(taken[v] for v in cases[number]), -number),
        )
        found.append(best)
        missing -= set(cases[best])
        for value in cases[best]:
            taken[value] += 1
    return found
