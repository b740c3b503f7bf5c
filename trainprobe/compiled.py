"""The compiled parts, where they are built and not forbidden; each has a portable twin with the same results."""

from __future__ import annotations

import os
from typing import Any


def forbidden() -> bool:
    """Tell whether the environment forbids compiled parts and kernels (TRAINPROBE_NATIVE=0); asked anew each time."""
    return os.environ.get("TRAINPROBE_NATIVE", "1") == "0"


def _load() -> Any | None:
    if forbidden():
        return None
    try:
        from trainprobe import _native  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    except ImportError:
        return None
    return _native  # pyright: ignore[reportUnknownVariableType]


native: Any | None = _load()
