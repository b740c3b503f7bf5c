"""Which inputs autocast cast to 16 bits before a recorded call."""

from __future__ import annotations

import torch

from trainprobe.op_check.cases import Case, mapped
from trainprobe.op_check.functions import api, is_in_place
from trainprobe.op_check.noise import UNIT

_NORMS = {
    "layer_norm",
    "group_norm",
    "batch_norm",
    "instance_norm",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
}
_CASTS = {"to", "type_as", "type", "half", "bfloat16", "copy", "setitem", "_to_copy", "index_put", "fill", "masked_fill"}


def autocast(case: Case) -> torch.dtype | None:
    """Return the 16-bit format that inputs were cast to before the call, None where the output's format needs no such story."""
    out = next((t.dtype for t in case.outputs if t is not None and t.dtype.is_floating_point), None)
    if out not in (torch.float16, torch.bfloat16) or _names_a_dtype(case) or api(case.name) in _CASTS:
        return None
    if takes_mixed_formats(case):
        return None
    given = [t.dtype for t in case.tensors() if t.dtype.is_floating_point and t.ndim]
    return out if any(d not in (out, torch.float64) and UNIT.get(d, 1.0) < UNIT[out] for d in given) else None


def takes_mixed_formats(case: Case) -> bool:
    """Return whether a norm was given 16 bits beside weights and statistics of float32, which its kernels take as they are."""
    first = next((t.dtype for t in case.tensors() if t.dtype.is_floating_point), None)
    return api(case.name) in _NORMS and first in (torch.float16, torch.bfloat16)


def _names_a_dtype(case: Case) -> bool:
    found: list[bool] = []
    mapped((case.args, dict(case.kwargs)), lambda t: t, lambda leaf: found.append(isinstance(leaf, torch.dtype)))
    return any(found) or is_in_place(case.name) or "out" in case.kwargs
