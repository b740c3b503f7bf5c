"""When gradients are clipped: the functions of `torch.nn.utils`, replaced only while a step is collected.

`clip_grad_norm_` scales the gradients in one inner function, which every caller reaches however it imported the outer one.
Torch before 2.6 has no inner function, and there the outer one is replaced. `FullyShardedDataParallel` clips by a method of its
own, which is replaced where a program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.flat_parameters import handles_of
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape

_NORM = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"
_NAMES = (_NORM, "clip_grads_with_norm_", "clip_grad_value_")
_PLACES = tuple((module, name) for module in (clip_grad, torch.nn.utils) for name in _NAMES if hasattr(module, name))


class ClippingTap(Tap):
    """Calls `unclipped(parameters)` before gradients are clipped and `norm(value, limit)` with the norm that the clipping found
    and the largest one that it leaves as it is.
    """

    def __init__(self, guard: Guard, unclipped: Callable[[list[Any]], None], norm: Callable[[Any, float], None]) -> None:
        self._guard = guard
        self._unclipped = unclipped
        self._norm = norm
        self._replaced: list[Replaced] = []
        self._of_kind: Replaced | None = None  # the method of FullyShardedDataParallel
        self._awake = False

    def begin(self, tape: Tape) -> None:
        """Replace the functions."""
        self._awake = True
        self._replaced = self._replaced or [
            Replaced(module, name, self._watched(getattr(module, name))) for module, name in _PLACES
        ]
        kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        if kind is not None and self._of_kind is None:
            self._of_kind = Replaced(kind, "clip_grad_norm_", self._of_shards(kind.clip_grad_norm_))

    def end(self, again: bool = False) -> None:
        """Put the functions back, or with `again` let ours rest in their place."""
        self._awake = False
        if again:
            return
        for replaced in (*self._replaced, self._of_kind):
            if replaced is not None:
                replaced.back()
        self._replaced.clear()
        self._of_kind = None

    def _watched(self, original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if clip.ended or not self._awake or torch.compiler.is_compiling():  # type: ignore[attr-defined]
                return original(parameters, *args, **kwargs)
            # what is handed over may be an iterator that can be read once
            chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._guard.run(self._unclipped, chosen)
            result = original(chosen, *args, **kwargs)
            norm = kwargs.get("total_norm", args[1] if len(args) > 1 else None) if result is None else result
            if isinstance(norm, torch.Tensor) and not _partial(norm):
                self._guard.run(self._norm, norm, _limit(args, kwargs))
            return result

        return clip

    def _of_shards(self, original: Any) -> Any:
        def clip_grad_norm_(model: Any, *args: Any, **kwargs: Any) -> Any:
            asleep = clip_grad_norm_.ended or not self._awake  # type: ignore[attr-defined]
            if asleep or not any(handle.uses_sharded_strategy for handle in handles_of([model])):
                return original(model, *args, **kwargs)  # which clips by torch's function
            self._guard.run(self._unclipped, list(model.parameters()))
            norm = original(model, *args, **kwargs)
            self._guard.run(self._norm, norm, _limit(args, kwargs))
            return norm

        return clip_grad_norm_


def _limit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    limit = kwargs.get("max_norm", args[0] if args else None)
    return float(limit) if isinstance(limit, int | float) else float("inf")


def _partial(norm: Any) -> bool:
    """Tell whether a norm is spread over ranks and would have to be joined by a collective to be known."""
    return any(not placement.is_replicate() for placement in getattr(norm, "placements", ()))
