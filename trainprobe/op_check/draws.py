"""Random signs, drawn once and used from random places on: drawing them anew for each step would cost more than the steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch

Tensor = torch.Tensor
_SPAN = 1 << 16  # elements that are moved at a time: they stay in the caches


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    with without_dispatch():  # what is made once must not be moved by the noise that first asks for it
        drawn = torch.randint(0, 2, (2 * _SPAN,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        return drawn.to(torch.float64).mul_(2).sub_(1)


@lru_cache(maxsize=16)
def _factors(relative: float) -> Tensor:
    with without_dispatch():
        return _signs() * relative + 1


class Draws:
    """Moves float64 tensors up and down at random, in the same way for the same turn."""

    def __init__(self, turn: int) -> None:
        self._random = random.Random(turn)

    def scaled(self, x: Tensor, relative: float) -> Tensor:
        """Return x·(1 ± relative), each element by itself."""
        factors = _factors(relative)
        flat, moved = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
        for begin, place in self._places(x.numel()):
            part = flat[begin : begin + _SPAN]
            torch.mul(part, factors[place : place + len(part)], out=moved[begin : begin + _SPAN])
        return moved.view(x.shape)

    def shifted(self, x: Tensor, amount: Tensor) -> Tensor:
        """Return x ± amount, each element by itself; it stays where the amount is no number. amount: is overwritten."""
        flat, moved = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
        amounts = amount.nan_to_num_(0.0, 0.0, 0.0).expand(x.shape).reshape(-1)
        for begin, place in self._places(x.numel()):
            part = flat[begin : begin + _SPAN]
            signs = _signs()[place : place + len(part)]
            torch.addcmul(part, amounts[begin : begin + _SPAN], signs, out=moved[begin : begin + _SPAN])
        return moved.view(x.shape)

    def factors(self, like: Tensor, relative: float) -> Tensor:
        """Return 1 ± relative, of the shape of `like`."""
        factors = _factors(relative)
        parts = [factors[at : at + min(_SPAN, like.numel() - begin)] for begin, at in self._places(like.numel())]
        return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)).view(like.shape)

    def _places(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield where each span begins, and from where on it takes its signs."""
        for begin in range(0, count, _SPAN):
            yield begin, self._random.randrange(_SPAN)
