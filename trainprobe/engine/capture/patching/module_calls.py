"""Calls of all modules, which go through a function of ours for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainprobe.engine.capture.patching.replaced import Replaced


def through(run: Callable[[Any, Any, Any, Any], Any]) -> Replaced:
    """Have each call of a module be `run(original, module, args, kwargs)`, which calls `original`; not while it is compiled."""
    original = torch.nn.Module._call_impl

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if call.ended or torch.compiler.is_compiling():  # type: ignore[attr-defined]
            return original(module, *args, **kwargs)
        return run(original, module, args, kwargs)

    return Replaced(torch.nn.Module, "_call_impl", call, traced=True)
