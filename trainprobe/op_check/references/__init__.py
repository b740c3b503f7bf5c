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

_FORMULAS: dict[str, Formula] = {}  # by the operator's name


@dataclass(frozen=True, slots=True)
class Sum:
    """What a formula adds up that is a sum of products, and nothing else.

    length: the number of products, from the operator's arguments. addends: parameters that are added and not multiplied.
    """

    length: Callable[..., int]
    addends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula, and what is known of the operator's kernels."""

    compute: Callable[..., Any]
    """Takes the operator's arguments in float64, and returns its results."""
    results: int | None = None
    """How many results it gives, where not all."""
    adds: Sum | None = None
    """Of a sum of products, whose rounding is known without trying."""
    pointwise: bool = False
    """Whether each element of the result depends only on the elements at its place."""
    wide: bool = False
    """Whether it holds for results of float32 and wider alone: 16-bit kernels round partial sums in an order of their own."""
    rounding: Callable[..., Any] | None = None
    """Tells from the arguments how far a kernel may be off, in units of what it calculates in; None where that is tried."""
    rows: bool = False
    """Whether a row of the result is made of sums over rows: an element may be off by the rounding of its whole row."""
    gradients: Callable[..., Any] | None = None
    """Tells from the gradient of the result and the arguments how far each argument's gradient is off at least, by its name.

    Most are not further off, and need not be tried.
    """


def formula(*names: str, **known: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a formula for operators of these names (see functions.api). known: fields of `Formula`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _FORMULAS.update(dict.fromkeys(names, Formula(function, **known)))
        return function

    return register


@cache
def formulas() -> dict[str, Formula]:
    """Return all formulas by the operator's name, from all files of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _FORMULAS
