"""Trainings whose ranks are not to be compared, nor waited for: they end at different steps, or differ on purpose.

And those whose weights other processes write, as Hogwild does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainprobe.engine.core.gathering import may_end_apart

_JOIN = (
    "ranks are not compared inside torch.distributed's Join: they may end at different steps, and one that has ended would not "
    "answer"
)
_LOCAL = "ranks are not compared: under local SGD each trains by itself from one average of the weights to the next"
_SHARED = (
    "the weights are in shared memory, where other processes may write them: whether something writes them between updates is "
    "not judged"
)
_LOCAL_HOOK = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def why_not_compared(models: Sequence[Any], optimizers: Sequence[Any]) -> str:
    """Return the sentence that says why, empty where ranks are compared; the same on every rank."""
    if may_end_apart(*models, *optimizers):
        return _JOIN
    hooks = [pair for model in models for pair in getattr(model, "_comm_hooks", ())]
    local = any(type(state).__module__ == _LOCAL_HOOK for _, state in hooks)
    return _LOCAL if local or any(type(each).__name__ == "PostLocalSGDOptimizer" for each in optimizers) else ""


def why_not_only_own(models: Sequence[Any]) -> str:
    """Return the sentence that says why weights change by more than their own updates, empty where they do not."""
    firsts = (next(iter(getattr(model, "parameters", tuple)()), None) for model in models)
    in_memory = (p for p in firsts if p is not None and str(getattr(p, "device", "")) == "cpu" and hasattr(p, "is_shared"))
    return _SHARED if any(p.is_shared() for p in in_memory) else ""
