"""Functional collectives: which operators they are, and which group and operation a call of one names.

`torch.distributed._functional_collectives` and DTensor call operators of the namespace `torch.ops._c10d_functional`, and in
backward passes too (older torch runs those of its autograd variants in C++, unseen). They return a result that the caller waits
for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# operator → the public function of torch.distributed that does the same
OPERATORS: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
}
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_REDUCES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def operators() -> list[tuple[Any, str]]:
    """Return (namespace, operator) of all that this torch has."""
    spaces = [getattr(torch.ops, name) for name in _NAMESPACES]
    return [(space, name) for space in spaces for name in OPERATORS if hasattr(space, name)]


def group_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the process group that a call names, by itself or by its name; None where it is neither."""
    named = kwargs.get("group_name", next((arg for arg in reversed(args) if _is_group(arg)), None))
    if isinstance(named, str):
        return dist.distributed_c10d._resolve_process_group(named)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]
    return named


def operation_in(args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the operation that a call names, as c10d writes it; None where it has none."""
    named = kwargs.get("reduce_op", args[1] if len(args) > 1 else None)
    return f"RedOpType.{named.upper()}" if isinstance(named, str) and named.lower() in _REDUCES else None


def _is_group(x: Any) -> bool:
    return isinstance(x, str | dist.ProcessGroup)
