"""Formulas of operators, written out in float64 by their definitions: one file for each family.

A formula takes what the operator takes and returns what it returns. It is made of steps that torch computes one by one (sums,
products, exponentials), not of the operator's own kernel, and torch's differentiation of these steps is the reference for the
backward. `stored` marks what a kernel may round to the output's format between two of its steps, `kept` a result that the
backward reads again.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

Formula = Callable[..., Any]
_FORMULAS: dict[str, Formula] = {}
_RESULTS: dict[str, int] = {}


def formula(*names: str, results: int | None = None) -> Callable[[Formula], Formula]:
    """Register a formula for operators of these names (see functions.api). results: how many it gives, where not all."""

    def register(function: Formula) -> Formula:
        _FORMULAS.update(dict.fromkeys(names, function))
        _RESULTS.update({} if results is None else dict.fromkeys(names, results))
        return function

    return register


@cache
def formulas() -> dict[str, Formula]:
    """Return all formulas by the operator's name, from all files of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _FORMULAS


def judged_results(name: str) -> int | None:
    """Return how many of an operator's results its formula gives, None for all."""
    formulas()
    return _RESULTS.get(name)
