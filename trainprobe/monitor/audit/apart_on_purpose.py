"""Trainings whose ranks are not to be compared, nor waited for: they end at different steps, or differ on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainprobe.engine.core.gathering import may_end_apart

_JOIN = (
    "ranks are not compared inside torch.distributed's Join: they may end at different steps, and one that has ended would not "
    "answer"
)
_LOCAL = "ranks are not compared: under local SGD each trains by itself from one average of the weights to the next"
_LOCAL_HOOK = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def why_not_compared(models: Sequence[Any], optimizers: Sequence[Any]) -> str:
    """Return the sentence that says why, empty where ranks are compared; the same on every rank."""
    if may_end_apart(*models, *optimizers):
        return _JOIN
    hooks = [pair for model in models for pair in getattr(model, "_comm_hooks", ())]
    local = any(type(state).__module__ == _LOCAL_HOOK for _, state in hooks)
    return _LOCAL if local or any(type(each).__name__ == "PostLocalSGDOptimizer" for each in optimizers) else ""
