"""Moves the weights of a training to neighbouring numbers before it begins, in a run that `trainprobe floor` starts.

This is the only part of the package that changes a training, and it is never there in another run.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.engine.core.log_lines import say

SEED = "TRAINPROBE_FLOOR_SEED"  # chooses which elements go up; 0 without it

_MOVED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: of several optimizers each moves once


def at_start() -> None:
    """Wait for torch or MindSpore, and for its optimizers to be made."""
    imports = ImportWatch()
    imports.wait_for("torch", _watch)
    imports.wait_for("mindspore", _watch_mindspore)


def _watch_mindspore(mindspore: Any) -> None:
    from trainprobe.integrations.mindspore_perturbed_start import watch_optimizers

    watch_optimizers()


def _watch(torch: Any) -> None:
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        moved = sum(move(parameter) for group in self.param_groups for parameter in group["params"])
        if moved:
            say(f"this run measures rounding: {moved} weights were moved by their last bit")

    torch.optim.Optimizer.__init__ = init


def move(parameter: Any) -> int:
    """Move each element of a float tensor to the next larger or smaller number, by chance; return how many there are.

    Zeros stay. The choice depends on the shape and SEED alone, so that replicas stay equal. The generators of the program are
    not used.
    """
    import torch

    if _MOVED.get(id(parameter)) is parameter or not parameter.is_floating_point() or parameter.numel() == 0:
        return 0
    _MOVED[id(parameter)] = parameter
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    seed = int(os.environ.get(SEED, "0"))
    up = torch.rand(local.shape, generator=torch.Generator().manual_seed(seed)).to(local.device) < 0.5
    with torch.no_grad():
        far = torch.where(up, torch.inf, -torch.inf).to(local.dtype)
        local.copy_(torch.where(local == 0, local, torch.nextafter(local, far)))
    return local.numel()
