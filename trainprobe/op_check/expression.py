"""A recorded call as Python code. Names come from a dump, which anybody may have written: none can become other code."""

from __future__ import annotations

import keyword
from typing import Any

import torch

from trainprobe.op_check.cases import Case, NotChecked, mapped
from trainprobe.op_check.functions import NAMESPACES, function

_OWNERS = {
    "Torch": ("torch", "torch._C._VariableFunctions"),
    "Functional": ("torch.nn.functional", "torch._C._nn"),
}
_FAMILIES = ("linalg", "fft", "special")
_PLAIN = (bool, int, str, torch.dtype, torch.memory_format, torch.layout, type(None), type(Ellipsis))


def expression(case: Case) -> str:
    """Return the call as a Python expression in which `t(i)` is the i-th tensor.

    Raises NotChecked where a name is no operator's, a keyword cannot be written, or an argument has no text of its own.
    """
    count = iter(range(len(case.tensors())))
    given = {key: value for key, value in case.kwargs.items() if key not in ("device", "out")}
    args, kwargs = mapped((tuple(case.args), given), lambda t: _Code(f"t({next(count)})"), _literal)
    for key in kwargs:
        if not _is_name(key):
            raise NotChecked(f"its keyword {key!r} is no Python name")
    return f"{_operator(case.name)}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def _operator(name: str) -> str:
    """Return where Python finds the operator. Raises NotChecked for what is no operator."""
    prefix, _, rest = name.partition(".")
    parts = name.split(".")
    if not all(map(_is_name, parts)) or (function(name) is None and not _is_foreign(prefix, parts)):
        raise NotChecked(f"{name!r} is no operator")
    if prefix == "Tensor":
        return f"torch.Tensor.{rest}"
    if prefix == "Torch" and (family := rest.partition("_")[0]) in _FAMILIES and not hasattr(torch, rest):
        return f"torch.{family}.{rest.partition('_')[2]}"
    for owner in _OWNERS.get(prefix, ()):
        if hasattr(_place(owner), rest):
            return f"{owner}.{rest}"
    return f"torch.ops.{NAMESPACES.get(prefix, prefix)}.{rest}"


def _is_foreign(prefix: str, parts: list[str]) -> bool:
    """Return whether a name may be an operator of a library that is missing here, and nothing else that torch.ops has."""
    torch_has_it = prefix in (*_OWNERS, "Tensor", "Aten", "Prims") or hasattr(type(torch.ops), prefix)
    if torch_has_it or any(part.startswith("_") for part in parts):
        return False
    return prefix not in vars(torch.ops) or isinstance(vars(torch.ops)[prefix], type(torch.ops.aten))


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _place(owner: str) -> Any:
    found: Any = torch
    for part in owner.split(".")[1:]:
        found = getattr(found, part)
    return found


class _Code(str):
    """Text that stands in Python code as it is."""

    def __repr__(self) -> str:
        return str(self)


def _literal(leaf: Any) -> Any:
    """Return a leaf whose `repr` is Python. Raises NotChecked for a type that has none."""
    if isinstance(leaf, float):
        return _Code(_number(leaf))
    if isinstance(leaf, complex):
        return _Code(f"complex({_number(leaf.real)}, {_number(leaf.imag)})")
    if isinstance(leaf, slice):
        bounds = [_literal(bound) for bound in (leaf.start, leaf.stop, leaf.step)]
        return _Code(f"slice({', '.join(map(repr, bounds))})")
    if type(leaf) in _PLAIN:
        return leaf
    raise NotChecked(f"an argument of type {type(leaf).__name__} cannot be written as Python")


def _number(value: float) -> str:
    finite = value == value and abs(value) != float("inf")
    return repr(float(value)) if finite else f"float({str(float(value))!r})"
