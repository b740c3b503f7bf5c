"""When two entries of a pack are of the same tensor, and how an entry reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.config_check.compare.values import close

STATISTICS = ("max", "min", "mean", "norm")
Batch = Mapping[str, Mapping[str, Any]]  # name of a tensor → its entry


def same_tensor(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Tell whether two entries are of the same tensor: by fingerprint, shape and dtype, else by statistics."""
    if "checksum" in a and "checksum" in b:
        return a["checksum"] == b["checksum"] and a.get("shape") == b.get("shape") and a.get("dtype") == b.get("dtype")
    shapes = a.get("shape"), b.get("shape")
    if None not in shapes and shapes[0] != shapes[1]:
        return False
    common = [key for key in STATISTICS if key in a and key in b]
    return bool(common) and all(close(a[key], b[key]) for key in common)


def describe(entry: Mapping[str, Any] | None) -> str:
    """Return shape, dtype and statistics of an entry in one line."""
    if entry is None:
        return "(missing)"
    shape = f"{entry['dtype']} {list(entry['shape'])}" if "shape" in entry else ""
    numbers = ", ".join(f"{key} {_number(entry[key])}" for key in STATISTICS if key in entry)
    return f"{shape} {numbers}".strip() or str(entry.get("note", ""))


def _number(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def batch_key(batch: Batch) -> tuple[Any, ...]:
    """Return what identifies a batch, however its tensors are named."""
    return tuple(sorted(str(e.get("checksum") or [e.get(s) for s in STATISTICS]) for e in batch.values()))
