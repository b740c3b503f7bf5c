"""Moves the weights of a MindSpore training to neighbouring numbers in a run of `trainprobe floor` (see `perturbed_start`)."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import mindspore
import numpy as np
from mindspore.experimental.optim import Optimizer as ListedOptimizer
from mindspore.nn import Optimizer

from trainprobe.engine.core.log_lines import say

_MOVED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: of several optimizers each moves once


def watch_optimizers() -> None:
    """Move the weights of each optimizer once it is made."""
    for kind in (Optimizer, ListedOptimizer):
        kind.__init__ = _then_move(kind.__init__)


def _then_move(made: Any) -> Any:
    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        moved = sum(map(move, self.parameters))
        if moved:
            say(f"this run measures rounding: {moved} weights were moved by their last bit")

    return init


def move(parameter: Any) -> int:
    """Move each element of a float parameter to the next larger or smaller number, by chance; return how many there are.

    Zeros stay. The choice depends on the shape alone, so that replicas stay equal. The generators of the program are not used.
    """
    if _MOVED.get(id(parameter)) is parameter or "Float" not in str(parameter.dtype) or 0 in parameter.shape:
        return 0
    _MOVED[id(parameter)] = parameter
    moved = parameter.asnumpy().copy()
    bits = moved.reshape(-1).view(f"i{moved.itemsize}")
    bits += np.where(np.random.default_rng(0).random(bits.shape) < 0.5, 1, -1).astype(bits.dtype) * (moved.reshape(-1) != 0)
    parameter.set_data(mindspore.Tensor(moved, parameter.dtype))
    return moved.size
