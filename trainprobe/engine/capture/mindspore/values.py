"""Values in the source of a cell, and what operators of MindSpore make of them, as far as that is certain.

An operator that is not listed here counts for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# operators that return a value of their own whatever they are given, by the lower-case names of functions and primitives
_COMPUTE = frozenset(
    (
        *("matmul", "batchmatmul", "bmm", "biasadd", "bias_add", "dense", "linear", "conv2d", "softmax", "relu"),
        *("relu6", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "square", "logsoftmax"),
        *("log_softmax", "cross_entropy", "rmsnorm"),
    )
)
# operators whose result may be what they are given, as MindSpore leaves out one that changes nothing
_MAY_PASS = frozenset(
    (
        *("reshape", "view", "transpose", "permute", "swapaxes", "cast", "astype", "to", "float", "half", "squeeze"),
        *("unsqueeze", "expand_dims", "expanddims", "flatten", "contiguous", "mean", "sum", "reducemean", "reducesum"),
        *("identity", "t"),
    )
)
_ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "realdiv": ast.Div}
ABOUT = frozenset(("shape", "rank", "dtype"))  # operators that look at a value's type alone: no uses of it


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A value that a function has while it runs.

    known: what made it is; else nothing else is certain. may_be: the values that it may be the same as. used: the places of the
    function's arguments that it is computed from. varies: it depends on parameters, so that it is no constant. const: a cell, a
    function or a setting, which is no value of the graph. argument: one that the function is given.
    """

    known: bool = False
    may_be: tuple[Value, ...] = ()
    used: frozenset[int] = frozenset()
    varies: bool = False
    const: Any = None
    argument: bool = False


UNKNOWN = Value()


def computed(values: Iterable[Value]) -> Value:
    """Return a new value that is computed from others."""
    items = list(values)
    return Value(True, used=places(items), varies=any(value.varies for value in items))


def passed(given: Sequence[Value]) -> Value:
    """Return the value of what may return the first that it is given."""
    return Value(True, tuple(given[:1]), given[0].used, given[0].varies) if given else UNKNOWN


def either(a: Value, b: Value) -> Value:
    """Return the value that a variable has after two branches."""
    if not all(value.known or value.argument for value in (a, b)):
        return UNKNOWN
    return Value(True, (a, b), a.used & b.used, a.varies and b.varies)


def operated(name: str, given: Sequence[Value], named: Iterable[Value] = ()) -> Value:
    """Return the value of an operator of MindSpore, by its lower-case name."""
    if name in _ARITHMETIC and len(given) == 2:
        return arithmetic(_ARITHMETIC[name], *given)
    if name in _MAY_PASS:
        return passed(given)
    return computed([*given, *named]) if name in _COMPUTE else UNKNOWN


def arithmetic(operation: type, left: Value, right: Value) -> Value:
    """Return the value of an operation; MindSpore leaves out one with a constant that changes nothing (`x * 1`, `x + 0`)."""
    both = (left, right)
    if operation is ast.MatMult:
        return computed(both)
    if operation not in (ast.Add, ast.Sub, ast.Mult, ast.Div):
        return Value(True, both)
    varying = tuple(value for value in both if value.varies)
    may_be = () if len(varying) == 2 else varying or both
    if operation in (ast.Add, ast.Sub):
        return Value(True, may_be, places(both), bool(varying))
    # a factor that is no parameter's may be the constant 0, and the other is then not needed
    needed = both if len(varying) == 2 else [value for value in both if varying and not value.varies and value.argument]
    return Value(True, may_be, places(needed), len(varying) == 2)


def places(values: Iterable[Value]) -> frozenset[int]:
    """Return the places of the arguments that any of these values is computed from."""
    return frozenset[int]().union(*(value.used for value in values))
