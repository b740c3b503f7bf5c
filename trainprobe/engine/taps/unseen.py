"""The tool's own work on tensors, out of sight of the program's torch-function modes."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def unseen() -> AbstractContextManager[Any]:
    """Return a context in which no torch-function mode or tensor subclass is asked; nothing where torch is not imported."""
    torch: Any = sys.modules.get("torch")
    return nullcontext() if torch is None else torch._C.DisableTorchFunction()
