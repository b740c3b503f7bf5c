"""The steps that formulas are made of: torch's own builtins, taken before anybody could put something in their place."""

from __future__ import annotations

from typing import Any

import torch

_BUILTINS: Any = getattr(torch._C, "_VariableFunctions")  # noqa: B009
Tensor = torch.Tensor

abs = _BUILTINS.abs
amax = _BUILTINS.amax
arange = _BUILTINS.arange
cat = _BUILTINS.cat
clamp = _BUILTINS.clamp
erf = _BUILTINS.erf
exp = _BUILTINS.exp
expm1 = _BUILTINS.expm1
gather = _BUILTINS.gather
index_select = _BUILTINS.index_select
log = _BUILTINS.log
log1p = _BUILTINS.log1p
matmul = _BUILTINS.matmul
mean = _BUILTINS.mean
ones = _BUILTINS.ones
ones_like = _BUILTINS.ones_like
rsqrt = _BUILTINS.rsqrt
sqrt = _BUILTINS.sqrt
stack = _BUILTINS.stack
sum = _BUILTINS.sum
tanh = _BUILTINS.tanh
where = _BUILTINS.where
zeros_like = _BUILTINS.zeros_like
