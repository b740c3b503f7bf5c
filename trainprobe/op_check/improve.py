"""Run chosen operators in higher precision: this changes the training, as the old fix mode of free_benchmark did."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainprobe.op_check.cases import Tensor, mapped

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class HigherPrecision(TorchFunctionMode):
    """Within `with HigherPrecision(["softmax"]):` these operators run in the next wider format and give their old one.

    THE TRAINING GOES ON WITH OTHER NUMBERS: a way to find out whether the precision of an operator matters to a loss, and never
    used by the rest of this tool. ops: names of torch functions or patterns of them, such as `softmax` or `*_norm`. 16-bit
    formats run in float32, float32 in float64. Functions that write in place run as they are.
    """

    def __init__(self, ops: Sequence[str]) -> None:
        super().__init__()
        self._ops = [*ops]
        self.calls = 0  # that ran in higher precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, in higher precision if it is chosen."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") or "out" in kwargs or not any(fnmatchcase(name, pattern) for pattern in self._ops):
            return func(*args, **kwargs)
        formats: list[torch.dtype] = []

        def wider(t: Tensor) -> Tensor:
            if t.dtype not in _WIDER:
                return t
            formats.append(t.dtype)
            return t.to(_WIDER[t.dtype])

        args, kwargs = mapped((tuple(args), kwargs), wider)
        result = func(*args, **kwargs)
        if not formats:
            return result
        self.calls += 1
        back = min(formats, key=lambda dtype: torch.finfo(dtype).bits)
        return mapped(result, lambda t: t.to(back) if t.dtype == _WIDER[back] else t)
