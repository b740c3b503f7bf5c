"""Linear systems, inverses, determinants and Cholesky factors of pairs of float64, by elimination as in every textbook."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainprobe.op_check.double_double import arithmetic, functions
from trainprobe.op_check.double_double.arithmetic import Pair, Tensor, exactly
from trainprobe.op_check.double_double.rules import Numbers, pair_of, rule

_LARGEST = 128  # rows: elimination takes them one by one


def _stacked(a: Pair) -> Pair:
    """Return stacks of matrices as one stack, in memory of its own."""
    if a[0].shape[-2] > _LARGEST:
        raise NotImplementedError(f"elimination of more than {_LARGEST} rows")
    high, low = (x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).clone() for x in a)
    return high, low


def _put(a: Pair, at: Any, values: Pair) -> None:
    a[0][at], a[1][at] = values


def _taken(a: Pair, at: Any) -> Pair:
    return a[0][at], a[1][at]


def _less_product(a: Pair, at: Any, column: Pair, row: Pair) -> None:
    """Take the outer product of a column and a row from a part of a."""
    outer = arithmetic.multiply(
        (column[0].unsqueeze(-1), column[1].unsqueeze(-1)), (row[0].unsqueeze(-2), row[1].unsqueeze(-2))
    )
    _put(a, at, arithmetic.subtract(_taken(a, at), outer))


def _factorised(a: Pair) -> tuple[Pair, Tensor]:
    """Return L below and U of P A = L U, and the row that each row was exchanged with, from 1 on."""
    lu = _stacked(a)
    count, n = lu[0].shape[:2]
    every = torch.arange(count)
    pivots = torch.empty(count, n, dtype=torch.int64)
    for k in range(n):
        chosen = lu[0][:, k:, k].abs().argmax(1) + k
        pivots[:, k] = chosen + 1
        for part in lu:
            part[every, chosen], part[:, k] = part[:, k].clone(), part[every, chosen].clone()
        if bool((lu[0][:, k, k] == 0).any()):
            raise NotImplementedError("elimination of a singular matrix")
        below = (slice(None), slice(k + 1, None), k)
        right = (slice(None), k, slice(k + 1, None))
        divisor = (lu[0][:, k, k].unsqueeze(1), lu[1][:, k, k].unsqueeze(1))
        _put(lu, below, arithmetic.divide(_taken(lu, below), divisor))
        rest = (slice(None), slice(k + 1, None), slice(k + 1, None))
        _less_product(lu, rest, _taken(lu, below), _taken(lu, right))
    return lu, pivots


def _exchanged(b: Pair, pivots: Tensor, *, back: bool = False) -> Pair:
    """Return the rows of b exchanged as those of the matrix were, or back."""
    high, low = b[0].clone(), b[1].clone()
    every, order = torch.arange(len(high)), range(pivots.shape[1])
    for k in reversed(order) if back else order:
        other = pivots[:, k].to(torch.int64) - 1
        for part in (high, low):
            part[every, other], part[:, k] = part[:, k].clone(), part[every, other].clone()
    return high, low


def _solved_triangular(t: Pair, b: Pair, *, upper: bool, unit: bool = False) -> Pair:
    """Return the solution of T X = B."""
    x = (b[0].clone(), b[1].clone())
    n = t[0].shape[-1]
    for k in reversed(range(n)) if upper else range(n):
        here = (slice(None), k, slice(None))
        if not unit:
            divisor = (t[0][:, k, k].unsqueeze(1), t[1][:, k, k].unsqueeze(1))
            _put(x, here, arithmetic.divide(_taken(x, here), divisor))
        others = slice(0, k) if upper else slice(k + 1, None)
        _less_product(x, (slice(None), others, slice(None)), _taken(t, (slice(None), others, k)), _taken(x, here))
    return x


def _mirrored(a: Pair) -> Pair:
    return a[0].mT, a[1].mT


def _solved(lu: Pair, pivots: Tensor, b: Pair, *, transposed: bool = False) -> Pair:
    """Return the solution of A X = B, or of Aᵀ X = B."""
    if transposed:
        y = _solved_triangular(_mirrored(lu), b, upper=False)
        return _exchanged(_solved_triangular(_mirrored(lu), y, upper=True, unit=True), pivots, back=True)
    y = _solved_triangular(lu, _exchanged(b, pivots), upper=False, unit=True)
    return _solved_triangular(lu, y, upper=True)


def _like(found: Pair, shape: Any) -> Numbers:
    return Numbers((found[0].reshape(shape), found[1].reshape(shape)))


def _info(a: Pair) -> Tensor:
    return torch.zeros(a[0].shape[:-2], dtype=torch.int32)


@rule("linalg_inv_ex")
def _inverse(func: Any, a: Any, check_errors: bool = False) -> tuple[Numbers, Tensor]:
    lu, pivots = _factorised(a)
    unit = torch.eye(a[0].shape[-1], dtype=torch.float64).expand(lu[0].shape)
    return _like(_solved(lu, pivots, exactly(unit)), a[0].shape), _info(a)


def _both_sides(a: Pair, b: Pair) -> tuple[Pair, Pair, Any]:
    """Return both as one stack each, and the shape of the solution."""
    batch = torch.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
    a = a[0].expand(*batch, *a[0].shape[-2:]), a[1].expand(*batch, *a[1].shape[-2:])
    shape = (*batch, *b[0].shape[-2:])
    rows: Any = tuple(x.expand(shape).reshape(math.prod(batch), *x.shape[-2:]) for x in b)
    return _stacked(a), rows, shape


@rule("_linalg_solve_ex")
def _solution(func: Any, a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    a, b = pair_of(a), pair_of(b)
    vector = b[0].ndim == 1 or (a[0].ndim - 1 == b[0].ndim and b[0].shape == a[0].shape[:-1])
    given: Pair = (b[0].unsqueeze(-1), b[1].unsqueeze(-1)) if vector else b
    given = given if left else _mirrored(given)
    matrix, right, shape = _both_sides(a, given)
    lu, pivots = _factorised(matrix)
    found = _like(_solved(lu, pivots, right, transposed=not left), shape)
    found = found if left else Numbers(_mirrored(found))
    found = Numbers((found[0].squeeze(-1), found[1].squeeze(-1))) if vector else found
    whole = (*shape[:-2], *a[0].shape[-2:])
    return found, _like(lu, whole), pivots.reshape(whole[:-1]).to(torch.int32), _info(a)


@rule("linalg_lu_solve")
def _solution_of_factors(func: Any, lu: Any, pivots: Tensor, b: Any, *, left: bool = True, adjoint: bool = False) -> Numbers:
    lu, b = pair_of(lu), pair_of(b)
    matrix, right, shape = _both_sides(lu, b if left else _mirrored(b))
    chosen = pivots.expand(*shape[:-2], pivots.shape[-1]).reshape(-1, pivots.shape[-1])
    found = _like(_solved(matrix, chosen, right, transposed=adjoint == left), shape)
    return found if left else Numbers(_mirrored(found))


@rule("lu_unpack")
def _parts(func: Any, lu: Any, pivots: Tensor, data: bool = True, order: bool = True) -> tuple[Any, ...]:
    permutation, _, _ = func(lu[0], pivots, False, order)
    if lu[0].shape[-1] != lu[0].shape[-2]:
        raise NotImplementedError("lu_unpack of matrices that are not square")
    below, unit = (lu[0].tril(-1), lu[1].tril(-1)), torch.eye(lu[0].shape[-1], dtype=torch.float64)
    lower = Numbers((below[0] + unit, below[1]))
    return permutation, lower if data else None, Numbers((lu[0].triu(), lu[1].triu())) if data else None


@rule("linalg_solve_triangular")
def _triangular(func: Any, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Numbers:
    a, b = pair_of(a), pair_of(b)
    if not left:
        a, b, upper = _mirrored(a), _mirrored(b), not upper
    matrix, right, shape = _both_sides(a, b)
    found = _like(_solved_triangular(matrix, right, upper=upper, unit=unitriangular), shape)
    return found if left else Numbers(_mirrored(found))


@rule("triangular_solve")
def _old_triangular(
    func: Any, b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Numbers, Numbers]:
    a = pair_of(a)
    given = _mirrored(a) if transpose else a
    found = _triangular(func, Numbers(given), b, upper=upper != transpose, unitriangular=unitriangular)
    return found, Numbers((a[0].clone(), a[1].clone()))


def _cholesky(a: Pair, upper: bool) -> Numbers:
    whole = _stacked(_mirrored(a) if upper else a)
    n = whole[0].shape[-1]
    factor = exactly(torch.zeros_like(whole[0]))
    for k in range(n):
        column = _taken(whole, (slice(None), slice(k, None), k))
        if bool((column[0][:, 0] <= 0).any()):
            raise NotImplementedError("Cholesky's factor of a matrix that is not positive definite")
        top = arithmetic.root((column[0][:, :1], column[1][:, :1]))
        column = arithmetic.divide(column, top)
        _put(factor, (slice(None), slice(k, None), k), column)
        _less_product(whole, (slice(None), slice(k, None), slice(k, None)), column, column)
    found = _like(factor, a[0].shape)
    return Numbers(_mirrored(found)) if upper else found


@rule("linalg_cholesky_ex")
def _cholesky_ex(func: Any, a: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Numbers, Tensor]:
    return _cholesky(a, upper), _info(a)


@rule("cholesky")
def _cholesky_alone(func: Any, a: Any, upper: bool = False) -> Numbers:
    return _cholesky(a, upper)


def _factorised_as_torch_does(a: Pair) -> tuple[Pair, Tensor]:
    """Return the factors of A, or of Aᵀ where A lies in order: the gradient of a determinant relies on that."""
    return _factorised(_mirrored(a) if a[0].is_contiguous() else a)


def _of_factors(lu: Pair, pivots: Tensor) -> tuple[Pair, Tensor]:
    """Return the diagonal of U, and the sign that exchanging rows makes."""
    odd = (pivots != torch.arange(1, pivots.shape[1] + 1)).sum(1) % 2
    diagonal: Any = tuple(x.diagonal(dim1=-2, dim2=-1) for x in lu)
    return diagonal, 1.0 - 2.0 * odd.to(torch.float64)


@rule("_linalg_det")
def _determinant(func: Any, a: Any) -> tuple[Any, ...]:
    lu, pivots = _factorised_as_torch_does(a)
    diagonal, sign = _of_factors(lu, pivots)
    whole = arithmetic.folded(diagonal, [1], arithmetic.multiply, 1.0)
    found = _like(arithmetic.times_power_of_two(whole, sign.unsqueeze(1)), a[0].shape[:-2])
    return found, _like(lu, a[0].shape), pivots.reshape(a[0].shape[:-1]).to(torch.int32)


@rule("_linalg_slogdet")
def _logarithm_of_determinant(func: Any, a: Any) -> tuple[Any, ...]:
    lu, pivots = _factorised_as_torch_does(a)
    diagonal, sign = _of_factors(lu, pivots)
    sign = sign * diagonal[0].sign().prod(1)
    logs = functions.logarithm(arithmetic.absolute(diagonal))
    found = _like(arithmetic.added_up(logs, [1]), a[0].shape[:-2])
    factors = _like(lu, a[0].shape), pivots.reshape(a[0].shape[:-1]).to(torch.int32)
    return Numbers(exactly(sign.reshape(a[0].shape[:-2]))), found, *factors
