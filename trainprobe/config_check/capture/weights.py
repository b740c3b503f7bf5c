"""Fingerprint and statistics of every parameter and buffer, on the device, brought to the host in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainprobe.config_check.capture.fingerprints import TensorFingerprints
from trainprobe.engine.core.naming import count_outer_wrappers, logical_name


def capture_weights(models: list[Any], step: int) -> Callable[[], dict[str, Any]]:
    """Start the reductions and return the function that waits for them: {"step", "parameters": name → entry}.

    models: the model, or its chunks (virtual pipeline stages). The part on this rank is taken of a sharded parameter.
    """
    tensors = TensorFingerprints()
    for name, kind, tensor in named_tensors(models):
        piece = getattr(tensor, "ds_tensor", None)
        if piece is not None and tensor.numel() == 0:  # released by ZeRO-3: this rank's piece is what exists
            tensors.add(
                name,
                _without_padding(tensor),
                kind=kind,
                **_trained(tensor),
                whole=list(tensor.ds_shape),
                part="this rank's of ZeRO-3",
            )
        else:
            tensors.add(name, tensor, kind=kind, **_trained(tensor))
    tensors.seal()
    return lambda: {"step": step, "parameters": tensors.content()}


def _trained(tensor: Any) -> dict[str, bool]:
    """Return whether a parameter gets a gradient; of buffers nothing is said."""
    return {"requires_grad": tensor.requires_grad} if isinstance(tensor, torch.nn.Parameter) else {}


def _without_padding(parameter: Any) -> Any:
    """Return this rank's piece of a ZeRO-3 parameter; the last pieces are filled up with memory that nobody has written."""
    piece = parameter.ds_tensor
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    kept = min(max(0, parameter.ds_numel - rank * piece.numel()), piece.numel())
    return piece.detach()[:kept]


def named_tensors(models: list[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (logical name, parameter or buffer, tensor); tied parameters once."""
    for chunk, model in enumerate(models):
        prefix = f"chunk{chunk}." if len(models) > 1 else ""
        outer = count_outer_wrappers(name for name, _ in model.named_modules() if name)
        for kind, pairs in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in pairs:
                yield prefix + logical_name(name, outer_wrappers=outer), kind, tensor
