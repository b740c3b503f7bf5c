"""Operators under one name, whichever tool or framework named them: the common names of `op_names.yaml`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml

# what an operator is called by tools that wrap it → by torch, whose function mode sees it
_OPERATORS = {"truediv": "div", "rdiv": "rtruediv", "mod": "remainder", "radd": "add", "rmul": "mul"}
_METHODS = frozenset(["add", "sub", "mul", "div", "remainder", "matmul", "pow", "neg", "abs", "gt", "lt", "ge", "le", "ne"])


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return yaml.safe_load((files("trainprobe.dump_compare") / "op_names.yaml").read_text(encoding="utf-8"))


@cache
def _op_names() -> dict[str, str]:
    """Return the name of an op in a dump, without its owner for torch and `Primitive.NAME` for MindSpore → the common name."""
    found = {name: common for common, row in _table().items() for name in row["torch"]}
    return found | {f"Primitive.{name}": common for common, row in _table().items() for name in row["primitive"]}


@cache
def _functions() -> dict[str, str]:
    """Return function of mindspore.ops or mint, or method of its Tensor → the common name."""
    return {name: common for common, row in _table().items() for kind in ("functional", "method") for name in row.get(kind, ())}


def common_name(name: str) -> str | None:
    """Return the common name of an op as a dump has it, `Tensor.__add__` or `Primitive.AddExt`; None where there is none."""
    if name.startswith("Primitive."):
        return _op_names().get(name)
    last = operator(name).rpartition(".")[2]
    return _op_names().get(last.strip("_"))


def mindspore_name(name: str) -> str:
    """Return the common name of an op of a MindSpore dump; the name of its type, or its own, where there is none.

    mindstudio-probe names a primitive also by the attribute that holds it (`Primitive.matmul.MatMul`), and the functions that
    a program calls (`Functional.relu`, `Mint.add`); this tool names the primitive that runs.
    """
    if name.startswith("Primitive."):
        plain = f"Primitive.{name.rpartition('.')[2]}"
        return _op_names().get(plain, plain)
    plain = operator(name)
    return _functions().get(plain.rpartition(".")[2].strip("_"), plain)


def operator(name: str) -> str:
    """Return the name of an op whether a tool names the operator or torch's function: `Tensor.__iadd__` is `Tensor.add_`."""
    owner, _, last = name.rpartition(".")
    if not (last.startswith("__") and last.endswith("__")):
        return name
    inner = last[2:-2]
    in_place = _OPERATORS.get(inner[1:], inner[1:]) if inner.startswith("i") else ""
    if in_place in _METHODS:
        return f"{owner}.{in_place}_"
    plain = _OPERATORS.get(inner, inner)
    return f"{owner}.{plain}" if plain in _METHODS else f"{owner}.__{plain}__"
