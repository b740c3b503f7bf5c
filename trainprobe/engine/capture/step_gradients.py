"""Gradients of a step: added without a hook of what sums or shards them, and compared as sets, parameter → tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor]
_SAMPLE = 1 << 12  # elements of a gradient


def differentiate(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of a loss to those of parameters, by no hook of what sums or shards them (DDP, ZeRO, Megatron).

    torch.autograd.grad would leave the modes that are in force, and checkpointed layers would run otherwise than before. Each
    is added as soon as it is there, so that no second set of them lives.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    trained, found = list(parameters), dict[Any, None].fromkeys([loss.grad_fn])
    nodes: list[Any] = list(found)
    for node in nodes:  # grows
        fresh = {inner: None for inner, _ in node.next_functions if inner is not None and inner not in found}
        nodes.extend(fresh)
        found |= fresh
    if any("CheckpointFunction" in node.name() for node in nodes):  # it refuses `torch.autograd.grad`
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        return
    with ExitStack() as stack:
        for p in trained:
            if p._backward_hooks is None:  # to register one leaves a dictionary, which each backward would look into
                stack.callback(setattr, p, "_backward_hooks", None)
            stack.callback(p.register_hook(partial(_added, p)).remove)
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, tuple(trained), True, False)


def _added(p: nn.Parameter, gradient: Tensor) -> Tensor:
    """Add a gradient to that of a parameter; return one that takes no memory, for the engine to collect."""
    with torch._C.DisableTorchFunction():
        p.grad = gradient if p.grad is None else p.grad + gradient
        return gradient.new_zeros(()).expand_as(gradient) if gradient.layout is torch.strided else gradient


def relative(a: float, b: float) -> float:
    """Return the distance of two numbers relative to the larger one; infinite where one is not finite."""
    if not (isfinite(a) and isfinite(b)):
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def distance(a: Any, b: Any) -> float:
    """Return the largest difference of two tensors of one shape, relative to their largest element."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    top = max(float(a.abs().max()), float(b.abs().max()), 1e-30)
    gap = float((a - b).abs().max())
    return gap / top if isfinite(gap) and isfinite(top) else float("inf")


def sampled(gradients: Gradients) -> Gradients:
    """Return copies of some elements of each gradient, evenly apart: what is linear in all is seen in them."""
    return {name: g.flatten()[:: 1 + g.numel() // _SAMPLE].clone() for name, g in gradients.items()}


def dot(a: Gradients, b: Gradients) -> float:
    """Return the inner product of two sets of gradients, in float64; a missing one is 0."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a.keys() & b.keys())


def apart(a: Gradients, b: Gradients) -> float:
    """Return the norm of the difference of two sets of gradients, relative to the larger one; infinite if one is not finite."""
    size, gap, none = max(dot(x, x) for x in (a, b)) ** 0.5, 0.0, torch.zeros((), dtype=torch.float64)
    for name in a.keys() | b.keys():
        x, y = (gradients.get(name, none) for gradients in (a, b))
        gap += float((x.double() - y.double()).square().sum())
    return gap**0.5 / max(size, 1e-30) if isfinite(gap) and isfinite(size) else float("inf")
