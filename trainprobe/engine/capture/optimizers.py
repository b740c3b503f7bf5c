"""Optimizers of torch's kind and their schedulers: groups, parameters and learning rates. Reads no device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainprobe.engine.core.live_objects import instances_of, with_subclasses


def parameters_of(optimizer: Any) -> Iterable[Any]:
    """Yield the tensors that an optimizer steps."""
    for group in groups_of(optimizer):
        yield from group["params"]


def live_optimizers() -> list[Any]:
    """Return the optimizers of torch.optim that are alive."""
    import torch

    return instances_of(with_subclasses(torch.optim.Optimizer))


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rate of each parameter group that keeps it as a plain number."""
    rates = (group.get("lr") for group in groups_of(optimizer))
    return tuple(float(rate) for rate in rates if isinstance(rate, float | int))


def optimizer_of(scheduler: Any) -> Any:
    """Return the optimizer that steps when the scheduler's does: Accelerate's is a wrapper."""
    optimizer = scheduler.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def groups_of(optimizer: Any) -> Iterable[Any]:
    """Return the parameter groups of an optimizer; none of what is no optimizer of torch's kind."""
    groups = getattr(optimizer, "param_groups", ())
    return groups if isinstance(groups, list | tuple) else ()


def updates_the_same(optimizer: Any, other: Any) -> bool:
    """Return whether two optimizers hold a parameter in common, and no group: with a group they would share its rate."""
    groups, others = list(groups_of(optimizer)), list(groups_of(other))
    if any(group is shared for group in groups for shared in others):
        return False
    held = {id(p) for group in groups for p in group["params"]}
    return any(id(p) in held for group in others for p in group["params"])
