"""Turns settings objects of any framework into plain values: numbers, texts, lists and mappings."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_DEEPEST = 6
_LONGEST = 10_000  # elements of a list or mapping
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as plain data; what has no value of its own is given by the name of its class or function.

    Understood: dataclasses, pydantic models, argparse namespaces, objects with `to_dict`, enumerations, dtypes, paths.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value, depth) if isinstance(value.value, str | int | float) else value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return getattr(value, "__qualname__", str(value))
    if isinstance(value, functools.partial):
        return {
            "function": plain(value.func),
            "args": plain(list(value.args)),
            **{k: plain(v, depth + 1) for k, v in value.keywords.items()},
        }
    if depth >= _DEEPEST:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v, depth + 1) for k, v in list(value.items())[:_LONGEST]}
    if isinstance(value, list | tuple):
        return [plain(v, depth + 1) for v in list(value)[:_LONGEST]]
    if isinstance(value, set | frozenset):
        return sorted((plain(v, depth + 1) for v in value), key=str)
    return _object(value, depth)


def _object(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind.__module__.partition(".")[0] in {"torch", "numpy"}:
        return _tensor_like(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name, None), depth + 1) for f in dataclasses.fields(value)}
    if hasattr(kind, "model_fields"):
        return {name: plain(getattr(value, name, None), depth + 1) for name in kind.model_fields}
    if kind.__name__ in {"Namespace", "SimpleNamespace", "AttributeDict"} or hasattr(value, "_get_kwargs"):
        return {k: plain(v, depth + 1) for k, v in vars(value).items()}
    return (
        kind.__name__
        if kind.__repr__ is object.__repr__
        else _ADDRESS.sub("", repr(value))[:500]
        if len(repr(value)) < 5000
        else kind.__name__
    )


def _tensor_like(value: Any) -> Any:
    """Return the number in a one-element tensor or array on the host, else what it is; a device is never waited for."""
    on_host = getattr(getattr(value, "device", None), "type", "cpu") in ("cpu", None) or isinstance(
        getattr(value, "device", None), str
    )
    if hasattr(value, "numel") and callable(value.numel):
        return plain(value.item()) if on_host and value.numel() == 1 else f"tensor{list(value.shape)}"
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return plain(value.item())
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"array{list(value.shape)}"
    return re.sub(r"^torch\.", "", _ADDRESS.sub("", str(value))) if len(str(value)) < 200 else type(value).__name__


def argument_names(kind: type) -> list[str]:
    """Return the names of a constructor's arguments; none of a compiled class, which has no signature."""
    try:
        return list(inspect.signature(kind.__init__).parameters)
    except (TypeError, ValueError):
        return []
