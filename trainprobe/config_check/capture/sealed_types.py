"""Replaces a method of a type that was written in C, for all its objects, and puts it back.

Python refuses to set attributes of such types. Its own dictionary of the type can still be written; the interpreter is then
told that the type has changed, as `PyType_Modified` of its C interface is there for. CPython only.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


def is_sealed(owner: Any) -> bool:
    """Tell whether a type refuses to have attributes set (no heap type, or marked immutable)."""
    heap, immutable = 1 << 9, 1 << 8
    return isinstance(owner, type) and (not owner.__flags__ & heap or bool(owner.__flags__ & immutable))


def can_replace(owner: type, name: str) -> bool:
    """Tell whether this interpreter lets the type's own method be replaced."""
    names = _names(owner)
    return names is not None and names.get(name) is vars(owner).get(name) is not None


def replace_method(owner: type, name: str, method: Any) -> None:
    """Put `method` in place of the type's own one; only where `can_replace` says so."""
    names = _names(owner)
    assert names is not None
    names[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def _names(owner: type) -> dict[str, Any] | None:
    if sys.implementation.name != "cpython":
        return None
    held = gc.get_referents(owner.__dict__)
    return held[0] if len(held) == 1 and type(held[0]) is dict else None
