"""`seed_all`: the same random numbers and, on request, the same kernels in each run. Scripts call it; a plan never does."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from trainprobe.engine.core.log_lines import say
from trainprobe.integrations.python_seed import DROPOUT_STAYS, seed_python

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_removed: set[str] = set()
_reported: set[str] = set()


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool | None = None, is_enhanced: bool = False) -> None:
    """Seed Python, NumPy and torch on every device.

    seed: a whole number from 0 to 2^32 - 1. mode: also choose deterministic kernels (slower; an op that has none raises).
    rm_dropout: from now on dropout of torch.nn and torch.nn.functional lets everything pass; where it is not given nothing is
    changed, and a line says so once. is_enhanced: not available; seed anew before each call that must repeat. Call it before
    the model is made. Raises UsageError for a seed outside that range.
    """
    seed_python(seed)
    torch.manual_seed(seed)  # every device that torch knows
    if is_enhanced:
        say("seed_all(is_enhanced=True): random calls do not each repeat; seed anew before what must", severity="warning")
    if mode:
        _choose_deterministic_kernels()
    if rm_dropout is None and not _reported:
        _reported.add("rm_dropout")
        say(DROPOUT_STAYS)
    if rm_dropout:
        for name in _DROPOUTS:
            _remove_dropout(name)


def _choose_deterministic_kernels() -> None:
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HCCL_DETERMINISTIC": "true"}.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _remove_dropout(name: str) -> None:
    """Have a function of torch.nn.functional, which the modules call too, drop nothing."""
    if name in _removed:
        return
    _removed.add(name)
    original: Any = getattr(torch.nn.functional, name)

    @functools.wraps(original)
    def nothing_dropped(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        return original(input, 0.0, *args, **kwargs)

    setattr(torch.nn.functional, name, nothing_dropped)
