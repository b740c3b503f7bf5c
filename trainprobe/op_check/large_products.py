"""Large products of matrices: some rows exactly, and of all rows a sum with random signs.

A row's elements, added up with random signs, are off by the root of the sum of their squared errors. Sums over blocks of
columns are held against the same sums of the reference, which cost as much as reading the matrices; a row that is off is taken
in among those that are judged element by element. One element that
is off by 64 bounds (root mean square over its block) shows in its sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainprobe.op_check.autocast import autocast
from trainprobe.op_check.cases import Case, Tensor
from trainprobe.op_check.error_locations import place_of
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.noise import UNIT
from trainprobe.op_check.references import formulas
from trainprobe.op_check.run import SINGLE, recorded_edges

LARGE = 1 << 28  # products of two numbers, from which on a call is not judged whole
ROWS = 64  # that are judged element by element in any case
_BLOCK = 1024  # columns
_MANY = 0.125  # of the rows: where so many are off, the whole is judged


@dataclass(frozen=True, slots=True)
class ProductPart:
    """One result of a call, by some of its rows. index: which result. rows: of the result, flattened to a matrix.

    shape: of the result. smaller: the call that gives these rows alone, as the result `place` of it.
    """

    index: int
    rows: Tensor
    shape: torch.Size
    smaller: Case
    place: int

    def back(self, found: Judgement) -> Judgement:
        """Return a judgement of the rows with its place in the whole result."""
        if found.at is None or len(found.at) != 2:
            return found
        furthest = tuple((self._whole(at), got, want) for at, got, want in found.furthest)
        return replace(found, at=self._whole(found.at), furthest=furthest)

    def _whole(self, at: Sequence[int]) -> tuple[int, ...]:
        return place_of(int(self.rows[at[0]]) * self.shape[-1] + at[1], self.shape)


@dataclass(frozen=True, slots=True)
class _Product:
    """a [M, K] times b [K, N], plus `added`; all in the operator's own order of arguments."""

    a: Tensor
    b: Tensor
    added: Tensor | None
    arguments: dict[str, Any]  # all
    names: tuple[str, str, str]  # of these three
    turned: bool  # b is given as [N, K]

    def call(self, case: Case, a: Tensor, b: Tensor, added: Tensor | None) -> Case:
        """Return the same operator of other matrices, b as [K, N]."""
        first, second, third = self.names
        given = {**self.arguments, first: a, second: b.mT if self.turned else b}
        if self.added is not None:
            given[third] = added
        return replace(case, args=(), kwargs=given, of_inputs=True, written={})


_ARGUMENTS = {  # operator → the names of a, b and what is added in its formula, and whether b is [N, K]
    "linear": ("input", "weight", "bias", True),
    **dict.fromkeys(("matmul", "mm"), ("input", "other", "", False)),
    "addmm": ("first", "second", "input", False),
}


def parts(case: Case, backward: bool) -> list[ProductPart] | None:
    """Return the results of a large product by some of their rows; None where the call has to be judged whole."""
    product = _product(case)
    if product is None:
        return None
    if not backward:
        y = case.outputs[0] if len(case.outputs) == 1 else None
        found = None if y is None else _of_result(case, product, y)
        return None if found is None else [found]
    return _of_gradients(case, product)


def _product(case: Case) -> _Product | None:
    name = api(case.name)
    if name not in _ARGUMENTS or "out" in case.kwargs or name.endswith("_") or case.written:
        return None
    *names, turned = _ARGUMENTS[name]
    try:
        given = dict(inspect.signature(formulas()[name].compute).bind(*case.args, **case.kwargs).arguments)
    except TypeError:
        return None
    a, b, added = (given.get(n) for n in names)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim >= 2 and b.ndim == 2):
        return None
    if any(t.dtype not in UNIT or t.is_complex() for t in (a, b)) or a.numel() * b.shape[0 if turned else 1] < LARGE:
        return None
    if added is not None and (not isinstance(added, Tensor) or (name == "addmm" and added.ndim != 1)):
        return None
    low = autocast(case)
    a, b = (t.detach() if low is None else t.detach().to(low) for t in (a.reshape(-1, a.shape[-1]), b.mT if turned else b))
    if a.shape[0] < 4 * ROWS or given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        return None
    return _Product(a, b, added, given, (names[0], names[1], names[2]), bool(turned))


def _of_result(case: Case, product: _Product, y: Tensor) -> ProductPart | None:
    rows = _rows(y.reshape(-1, y.shape[-1]), product.a, product.b, product.added)
    if rows is None:
        return None
    flat = y.reshape(-1, y.shape[-1])[rows]
    smaller = product.call(case, product.a[rows], product.b, product.added)
    return ProductPart(0, rows, y.shape, replace(smaller, outputs=[flat], gradients=None, results=()), 0)


def _of_gradients(case: Case, product: _Product) -> list[ProductPart] | None:
    given = case.gradients or ()
    if len(given) != 1 or given[0] is None or given[0].ndim < 2:
        return None
    edges = [*range(len(case.results))] if case.of_inputs else recorded_edges(case)
    if edges is None or len(edges) < len(case.results):
        return None
    tensors = case.tensors()
    found: list[ProductPart] = []
    g = given[0].reshape(-1, given[0].shape[-1])
    for index, (result, edge) in enumerate(zip(case.results, edges, strict=False)):
        if result is None or edge is None:
            continue
        which = next((i for i, n in enumerate(product.names) if product.arguments.get(n) is tensors[edge]), None)
        part = None if which is None else _of_gradient(case, product, g, index, which, result)
        if part is None:
            return None
        found.append(part)
    return found or None


def _of_gradient(case: Case, product: _Product, g: Tensor, index: int, which: int, result: Tensor) -> ProductPart | None:
    """Return a gradient by some of its rows. which: of a, b and what is added."""
    a, b, added = product.a, product.b, product.added
    place = _order(product)[which]
    if which == 2:  # a sum over all rows of g, which one column of a and one row of b are enough for
        smaller = product.call(case, a[:, :1], b[:1], added)
        rows = torch.zeros(1, dtype=torch.int64)
        return _part(ProductPart(index, rows, result.shape, smaller, place), g, result)
    matrix = result.reshape(-1, result.shape[-1])
    if which == 0:
        rows = _rows(matrix, g, b.mT, None)
        if rows is None:
            return None
        smaller = product.call(case, a[rows], b, added)
        return _part(ProductPart(index, rows, result.shape, smaller, place), g[rows], matrix[rows])
    left, right = (g.mT, a) if product.turned else (a.mT, g)
    rows = _rows(matrix, left, right, None) if matrix.shape[0] >= 4 * ROWS else torch.arange(matrix.shape[0])
    if rows is None:
        return None
    if product.turned:
        added = None if added is None else added[rows]
        smaller = product.call(case, a, b[:, rows], added)
        return _part(ProductPart(index, rows, result.shape, smaller, place), g[:, rows], matrix[rows])
    smaller = product.call(case, a[:, rows], b[rows], added)
    return _part(ProductPart(index, rows, result.shape, smaller, place), g, matrix[rows])


def _order(product: _Product) -> list[int]:
    """Return where a, b and what is added stand among the tensor arguments, by keyword in the operator's order."""
    names = [n for n, value in product.arguments.items() if isinstance(value, Tensor)]
    return [names.index(n) if n in names else -1 for n in product.names]


def _part(part: ProductPart, g: Tensor, result: Tensor) -> ProductPart:
    smaller = part.smaller
    count = len(smaller.tensors())
    results = [result if i == part.place else None for i in range(count)]
    wanted = [i == part.place for i in range(count)]
    return replace(part, smaller=replace(smaller, gradients=[g], results=results, requires_grad=wanted))


def _rows(y: Tensor, a: Tensor, b: Tensor, added: Tensor | None) -> Tensor | None:
    """Return the rows of y = a b + added to be judged: the ends, some at random, and all whose sums are off; None for all."""
    if y.dtype not in UNIT or y.shape != (a.shape[0], b.shape[1]):
        return None
    generator = torch.Generator().manual_seed(0)
    odd = _off(y, a, b, added, generator)
    if float(odd.to(torch.float64).mean()) > _MANY:
        return None
    odd[torch.randperm(len(odd), generator=generator)[: ROWS - 2]] = True
    odd[0] = odd[-1] = True
    return odd.nonzero().squeeze(-1)


def _off(y: Tensor, a: Tensor, b: Tensor, added: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the rows with a block of columns whose sum with random signs is off by more than its elements may be."""
    accumulate = min(SINGLE, UNIT[y.dtype])
    wide = a.to(torch.float64)
    norms = wide.square().sum(1, True).sqrt_()
    odd = torch.zeros(len(y), dtype=torch.bool)
    for columns, part in _blocks(b):
        signs = torch.randint(0, 2, (part.shape[1], 1), generator=generator).to(torch.float64) * 2 - 1
        own = y[:, columns].to(torch.float64)
        want = wide @ (part @ signs)
        if added is not None:
            want = want + (added[columns].to(torch.float64) @ signs)
        error = own @ signs - want
        bound = own.square().sum(1, True).sqrt_().mul_(UNIT[y.dtype]) + norms * (accumulate * float(part.norm()))
        odd |= ~(error.abs() <= (4 if y.dtype == torch.float64 else 1) * bound).squeeze(1)
    return odd


def _blocks(b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for begin in range(0, b.shape[1], _BLOCK):
        columns = slice(begin, min(begin + _BLOCK, b.shape[1]))
        yield columns, b[:, columns].to(torch.float64)


def told(found: Sequence[ProductPart]) -> str:
    """Return how much was judged, in words."""
    sizes = [f"{len(p.rows)} of {p.shape[:-1].numel()} rows" for p in found if len(p.shape) > 1]
    return f"{', '.join(sizes)} exactly, the others by sums with random signs" if sizes else ""
