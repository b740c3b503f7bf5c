"""Sums of float64 with their rounding errors, in Triton's language (see `triton_kernels`)."""

# the body of a kernel is Triton's language: Python's grammar with other types
# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportReturnType=false, reportOptionalMemberAccess=false

import triton
import triton.language as tl

_LARGE = tl.constexpr(2.0**480)
_SMALL = tl.constexpr(2.0**-480)
_DOWN = tl.constexpr(2.0**-600)
_UP = tl.constexpr(2.0**600)


@triton.jit
def two_sum(a, b):
    """Return a + b and its rounding error."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@triton.jit
def _both(s, c, other, lost):
    total, error = two_sum(s, other)
    return total, c + lost + error


@triton.jit
def fold(s, c):
    """Add lanes pairwise, errors kept: the scalars (sum, correction)."""
    return tl.reduce((s, c), 0, _both)


@triton.jit
def shrunk(exponent, shared):
    """Return what a square root of squares is multiplied by to stand under the larger exponent: 1, 2^-600 or 0."""
    return tl.where(exponent == shared, 1.0, tl.where(shared - exponent == 600, _DOWN, 0.0)).to(tl.float64)


@triton.jit
def add_squares(x, q, qc, exponent):
    """Add squares of float64 to compensated lanes, each under 4^exponent of its own; a larger element moves its lane up."""
    large = tl.abs(x)
    shared = tl.maximum(exponent, tl.where(large > _LARGE, 600, tl.where(large < _SMALL, -600, 0)))
    shrink = shrunk(exponent, shared)
    w = x * tl.where(shared == 600, _DOWN, tl.where(shared == -600, _UP, 1.0))
    q, lost = two_sum(q * shrink * shrink, w * w)
    return q, qc * shrink * shrink + lost, shared


@triton.jit
def fold_squares(q, qc, exponent):
    """Add lanes of squares pairwise: the scalars (sum, correction, exponent); zeros alone have the exponent 0."""
    shared = tl.max(exponent, 0)
    shrink = shrunk(exponent, shared)
    q, qc = fold(q * shrink * shrink, qc * shrink * shrink)
    return q, qc, tl.where(q > 0, shared, 0).to(tl.float64)
