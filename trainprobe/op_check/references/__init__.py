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
from dataclasses import dataclass
from functools import cache
from typing import Any

Formula = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sum:
    """What a formula adds up that is a sum of products, and nothing else.

    length: the number of products, from the operator's arguments. addends: parameters that are added and not multiplied.
    """

    length: Callable[..., int]
    addends: tuple[str, ...] = ()


Known = Callable[..., Any]
_FORMULAS: dict[str, Formula] = {}
_KNOWN: dict[str, Known] = {}
_GRADIENTS: dict[str, Known] = {}
_RESULTS: dict[str, int] = {}
_SUMS: dict[str, Sum] = {}
_POINTWISE: set[str] = set()
_WIDE: set[str] = set()
_ROWS: set[str] = set()


def formula(
    *names: str,
    results: int | None = None,
    adds: Sum | None = None,
    pointwise: bool = False,
    wide: bool = False,
    rounding: Known | None = None,
    rows: bool = False,
    gradients: Known | None = None,
) -> Callable[[Formula], Formula]:
    """Register a formula for operators of these names (see functions.api).

    results: how many it gives, where not all. adds: for a sum of products, whose rounding is known without trying.
    pointwise: each element of the result comes of the elements at its place alone. wide: for results of float32 and wider
    alone, because kernels of 16 bits round partial sums in an order of their own. rounding: tells from the arguments how far
    a kernel may be off, in units of what it calculates in. rows: a row of the result is made of sums over rows, so that an
    element may be off by the rounding of its whole row. gradients: tells from the gradient of the result and the arguments how
    far the gradient of each argument is off at least, by the argument's name: most are not further off, and need not be tried.
    """

    def register(function: Formula) -> Formula:
        _FORMULAS.update(dict.fromkeys(names, function))
        _RESULTS.update({} if results is None else dict.fromkeys(names, results))
        _SUMS.update({} if adds is None else dict.fromkeys(names, adds))
        _POINTWISE.update(names if pointwise else ())
        _WIDE.update(names if wide else ())
        _ROWS.update(names if rows else ())
        _KNOWN.update({} if rounding is None else dict.fromkeys(names, rounding))
        _GRADIENTS.update({} if gradients is None else dict.fromkeys(names, gradients))
        return function

    return register


def known_rounding(name: str) -> Known | None:
    """Return what tells how far an operator may be off, None where that has to be tried."""
    formulas()
    return _KNOWN.get(name)


def rounding_of_gradients(name: str) -> Known | None:
    """Return what tells how far an operator's gradients are off at least, None where that has to be tried."""
    formulas()
    return _GRADIENTS.get(name)


def sum_of_products(name: str) -> Sum | None:
    """Return what an operator's formula adds up, None where it is more than a sum of products."""
    formulas()
    return _SUMS.get(name)


@cache
def formulas() -> dict[str, Formula]:
    """Return all formulas by the operator's name, from all files of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _FORMULAS


def is_pointwise(name: str) -> bool:
    """Return whether an operator's formula works element by element."""
    formulas()
    return name in _POINTWISE


def adds_rows(name: str) -> bool:
    """Return whether rows of an operator's result are made of sums over rows."""
    formulas()
    return name in _ROWS


def is_wide(name: str) -> bool:
    """Return whether an operator's formula holds for results of float32 and wider alone."""
    formulas()
    return name in _WIDE


def judged_results(name: str) -> int | None:
    """Return how many of an operator's results its formula gives, None for all."""
    formulas()
    return _RESULTS.get(name)
