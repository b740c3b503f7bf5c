"""Small models that each hold one thing a probe can get wrong: the file's name says which.

A file here has `build()`, which returns a model, and `batch(step)`, which returns its positional arguments. It may have
`loss(model, batch)` where the default (the mean of every floating leaf of the output, added up) will not do, `MICRO` (batches a
step), and `IN_PLACE = True` where torch's own full-backward hooks cannot be used on it. A new file is found by its name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the set and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[[nn.Module, tuple[Any, ...]], Tensor]
    micro: int = 1
    in_place: bool = False


NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> Case:
    """Return the case that file `name` holds."""
    file = importlib.import_module(f"{__name__}.{name}")
    loss = getattr(file, "loss", mean_of_leaves)
    return Case(name, file.build, file.batch, loss, getattr(file, "MICRO", 1), getattr(file, "IN_PLACE", False))


def mean_of_leaves(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    """Return the sum of the mean magnitudes of all differentiable leaves of the output, a scalar."""
    leaves = [leaf for leaf in pytree.tree_leaves(unpack(model(*batch))) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().abs().mean() for leaf in leaves if leaf.requires_grad and leaf.numel()]).sum()


def unpack(output: Any) -> Any:
    """Turn a dataclass output into a dict that pytree knows."""
    fields = getattr(output, "__dataclass_fields__", None)
    return {name: getattr(output, name) for name in fields} if fields else output


def normal(step: int, *shape: int, seed: int = 0) -> Tensor:
    """Return N(0, 1) float32 of `shape`, decided by step and seed alone; the global generator is not touched."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + step))


def integers(step: int, high: int, *shape: int) -> Tensor:
    """Return int64 of `shape` in [0, high), decided by the step alone."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(step))
