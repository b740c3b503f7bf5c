"""Turn what stands in a checkpoint beside its tensors into plain values that compare and print well."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainprobe.ckpt_compare.storage.inert_objects import Thing
from trainprobe.ckpt_compare.storage.torch_archive import leaves


def flat(value: Any, most: int = 32) -> dict[str, Any]:
    """Return path → plain value; long sequences and arrays become a short digest of their content."""
    found: dict[str, Any] = {}
    for key, inner in _entries(value):
        if isinstance(inner, Mapping) or (isinstance(inner, Thing) and inner.state):
            found.update({f"{key}.{k}" if k else key: v for k, v in flat(inner, most).items()})
        elif isinstance(inner, (list, tuple)) and len(inner) > most:
            found[key] = digest(inner)
        elif isinstance(inner, (list, tuple)) and any(isinstance(v, (Mapping, Thing)) for v in inner):
            for i, v in enumerate(inner):
                found.update({f"{key}.{i}.{k}": w for k, w in flat(v, most).items()})
        else:
            found[key] = plain(inner)
    return found


def _entries(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Thing):
        value = value.state
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return [("", value)]


def plain(value: Any) -> Any:
    """Return a number, text, bool, None or list as it is, and anything else as text or digest."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if (number := _number(value)) is not None:
        return number
    if hasattr(value, "load") or isinstance(value, (bytes, np.ndarray)) or hasattr(value, "value"):
        return digest(value)
    return repr(value)


def _number(value: Any) -> Any:
    """Return the number of an array of one element, which equal bits alone give; None of any other value."""
    if not (hasattr(value, "load") and hasattr(value, "format") and math.prod(value.shape) == 1):
        return None
    held = value.load()
    if held.dtype.name != value.format.name or value.format.parts > 1:
        return None
    number = held.reshape(()).item()
    return None if number != number or (number == 0 and math.copysign(1, number) < 0) else number


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that stand for a state too long to print (SHA-256 over its leaves)."""
    total = hashlib.sha256()
    for path, leaf in leaves(value):
        total.update("/".join(path).encode())
        if hasattr(leaf, "load"):
            total.update(np.ascontiguousarray(leaf.load()).tobytes())
        elif isinstance(leaf, np.ndarray):
            total.update(np.ascontiguousarray(leaf).tobytes())
        else:
            total.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return total.hexdigest()[:16]
