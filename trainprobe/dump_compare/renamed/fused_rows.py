"""How the rows of a projection lie that is several on the other side: by a map of names, or found by the stored weights.

In one family all rows of q come first, then those of k and of v; in another each group of heads has its own q, k and v. Both,
and gate and up, are interleaved in some number of groups (see engine.geometry.fused_rows). Where the map says the number,
nothing else is asked; else the weights of both sides tell it, as far as both dumps store them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.geometry.fused_rows import interleaved

Array = npt.NDArray[Any]
Load = Callable[[], Sequence[Array | None]]
_ALIKE = 1e-3  # of what rows differ by among each other: those of two sides are apart by rounding, or by a step
_MOST, _SOME = 0.5, 0.1  # shares of rows that must be alike for weights to tell the order; less where a map says that of parts


@dataclass(frozen=True, slots=True)
class RowOrder:
    """order: for each row of the one module, which row it is of those of the parts, one part after the other.

    sizes: rows of the parts. turned: whether the one module, and whether the parts, keep their matrices transposed.
    """

    order: npt.NDArray[np.int64]
    sizes: tuple[int, ...]
    turned: tuple[bool, bool]

    def together(self, parts: Sequence[Array], *, weights: bool) -> Array | None:
        """Return the values of parts as the one module has them, None where these are not of this form."""
        matrices = weights and all(part.ndim == 2 for part in parts)
        along = 0 if weights else -1
        turned = self.turned if matrices else (False, False)
        straight = [part.T if turned[1] else part for part in parts]
        if [part.shape[along] if part.ndim else 0 for part in straight] != list(self.sizes):
            return None
        if len({np.moveaxis(part, along, 0).shape[1:] for part in straight}) > 1:
            return None
        whole = np.take(np.concatenate(straight, along), self.order, along)
        return whole.T if turned[0] else whole

    def place(self, at: Sequence[int], *, weights: bool) -> tuple[int, list[int]]:
        """Return which part an element of the one module is of, and where it is there."""
        where = list(at)
        axis = (1 if self.turned[0] and len(at) == 2 else 0) if weights else len(at) - 1
        row = int(self.order[where[axis]])
        part = next(i for i in range(len(self.sizes)) if row < sum(self.sizes[: i + 1]))
        where[axis] = row - sum(self.sizes[:part])
        return part, where[::-1] if weights and len(at) == 2 and self.turned[0] != self.turned[1] else where


@dataclass(frozen=True, slots=True)
class Laid:
    """How values of several modules lie in that of the one. names: of the parts. weights: whether rows are the first axis."""

    rows: RowOrder
    names: Sequence[str]
    weights: bool

    def together(self, parts: Sequence[Array]) -> Array | None:
        """Return the values of parts as the one module has them, None where these are not of this form."""
        return self.rows.together(parts, weights=self.weights)

    def place(self, at: Sequence[int]) -> str:
        """Return which element of which part an element of the one module is."""
        part, where = self.rows.place(at, weights=self.weights)
        return f"most at {where} of {self.names[part]}"


def find_rows(
    whole: tuple[int, ...], parts: Sequence[tuple[int, ...]], groups: int, load: Load, *, named: bool
) -> RowOrder | None:
    """Return how the rows lie, None where nothing tells it.

    whole, parts: shapes of the matrices. groups: their number as a map says it, 0 where it does not. named: whether a map says
    the order of the parts. load: returns the matrix of the one and behind it those of the
    parts, None for each that is not stored.
    """
    ways = [(one, other) for one in (False, True) for other in (False, True)]
    forms = [(turned, sizes) for turned in ways if (sizes := _sizes(whole, parts, turned)) is not None]
    if not forms:
        return None
    if groups and len(forms) == 1:
        turned, sizes = forms[0]
        return RowOrder(_order(sizes, range(len(sizes)), groups), sizes, turned)
    loaded = [matrix for matrix in load() if matrix is not None]
    if len(loaded) <= len(parts):
        return None
    best, most = None, _SOME if named else _MOST
    for turned, sizes in forms:
        mine, theirs = _signatures(loaded[0], loaded[1:], turned)
        near = _ALIKE * float(np.std(theirs))
        for order in _orders(sizes, groups, named):
            share = float(np.mean(np.abs(mine - theirs[order]) <= near))
            if share > most:
                best, most = RowOrder(order, sizes, turned), share
            if share == 1:
                return best
    return best


def _sizes(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]], turned: tuple[bool, bool]) -> tuple[int, ...] | None:
    """Return the rows of each part where these make the whole, matrices being transposed or not."""
    rows, columns = whole[::-1] if turned[0] else whole
    straight = [part[::-1] if turned[1] else part for part in parts]
    fits = sum(part[0] for part in straight) == rows and all(part[1] == columns for part in straight)
    return tuple([part[0] for part in straight]) if fits else None


def _signatures(whole: Array, parts: Sequence[Array], turned: tuple[bool, bool]) -> tuple[Array, Array]:
    """Return one number for each row of the one matrix, and of those of the parts one after the other."""
    matrices = [whole.T if turned[0] else whole, *[part.T if turned[1] else part for part in parts]]
    by = np.random.default_rng(0).standard_normal(matrices[0].shape[1])
    mine, *theirs = [np.asarray(matrix, np.float64) @ by for matrix in matrices]
    return mine, np.concatenate(theirs)


def _orders(sizes: Sequence[int], groups: int, named: bool) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the orders that rows may be in: first those of few groups."""
    common = math.gcd(*sizes)
    counts = [groups] if groups else [n for n in range(1, common + 1) if common % n == 0]
    for count in counts:
        for parts in [range(len(sizes))] if named else permutations(range(len(sizes))):
            yield _order(sizes, parts, count)


def _order(sizes: Sequence[int], parts: Sequence[int], groups: int) -> npt.NDArray[np.int64]:
    """Return for each row of the one which it is of those of the parts. parts: in which order these lie in it."""
    begins = [sum(sizes[:part]) for part in parts]
    bands = interleaved([sizes[part] for part in parts], groups)
    return np.concatenate([np.arange(band.size) + begins[band.part] + band.target for band in bands])
