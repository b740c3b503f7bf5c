"""The Triton kernel that merges the parts of each tensor to its row; see `triton_kernels` for both."""

# the body of a kernel is Triton's language: Python's grammar with other types
# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportReturnType=false, reportOptionalMemberAccess=false

import triton
import triton.language as tl

from trainprobe.engine.arrays.triton_kernels import CHECKSUM, COMPENSATED, EXACT, PART, STATS, STD, SUBNORMAL, cell
from trainprobe.engine.arrays.triton_sums import fold, fold_squares, shrunk, two_sum
from trainprobe.engine.stats import partials

NAN, POSINF, NEGINF, ZERO, MIN, MAX = (PART[name] for name in ("nan", "posinf", "neginf", "zero", "min", "max"))
SUM, SUM_LOST, SUMSQ, SUMSQ_LOST = (PART[name] for name in ("sum", "sum_lost", "sumsq", "sumsq_lost"))
M2, EXPONENT, BELOW, FINITE, MEAN = (PART[name] for name in ("m2", "exponent", "subnormal", "finite", "mean"))
FINGERPRINT, UPPER, LOWER = (PART[name] for name in ("fingerprint", "upper", "lower"))
_ROW = {name: tl.constexpr(i) for i, name in enumerate(partials.PARTIALS)}
ROW_COUNT, ROW_NAN, ROW_POSINF, ROW_NEGINF, ROW_ZERO = (_ROW[name] for name in ("count", "nan", "posinf", "neginf", "zero"))
ROW_MIN, ROW_MAX, ROW_SUM, ROW_SUMSQ = (_ROW[name] for name in ("min", "max", "sum", "sumsq"))
ROW_M2, ROW_EXPONENT, ROW_BELOW = (_ROW[name] for name in ("m2", "exponent", "subnormal"))
ROW = tl.constexpr(partials.WIDTH)


@triton.jit
def _column(part, stride, k: tl.constexpr, at, blocks, other):
    """Load a column of parts."""
    return tl.load(part.to(tl.pointer_type(tl.float64)) + k * stride + at, mask=at < blocks, other=other)


@triton.jit
def _integers(part, stride, k: tl.constexpr, blocks, levels: tl.constexpr):
    """Add a column of int64 over the parts, modulo 2^64."""
    lanes = tl.zeros([1 << levels], tl.int64)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels)
        lanes += tl.load(part.to(tl.pointer_type(tl.int64)) + k * stride + at, mask=at < blocks, other=0)
    return tl.sum(lanes, 0)


@triton.jit
def _exact_sum(part, stride, blocks, levels: tl.constexpr):
    """Add 64-bit integers from the sums of their halves and round once (torch_reduce._exact_sum)."""
    upper = tl.zeros([1 << levels], tl.int64)
    lower = tl.zeros([1 << levels], tl.int64)
    halves = part.to(tl.pointer_type(tl.int64))
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels)
        low = tl.load(halves + LOWER * stride + at, mask=at < blocks, other=0)
        upper += tl.load(halves + UPPER * stride + at, mask=at < blocks, other=0) + (low >> 32)
        lower += low & 0xFFFFFFFF
    high, low_sum = tl.sum(upper, 0), tl.sum(lower, 0)
    high += low_sum >> 32
    low_sum = ((high & 0xFFFFF) << 32) | (low_sum & 0xFFFFFFFF)
    return (high >> 20).to(tl.float64) * (2.0**52) + low_sum.to(tl.float64)


@triton.jit
def _spread(part, stride, total, blocks, levels: tl.constexpr):
    """Add squared deviations of parts from the mean of the whole (Chan, Golub and LeVeque, 1979)."""
    good = tl.zeros([1 << levels], tl.float64)
    for begin in range(0, blocks, 1 << levels):
        good += _column(part, stride, FINITE, begin + tl.arange(0, 1 << levels), blocks, 0.0)
    whole = tl.where(tl.sum(good, 0) > 0, total / tl.maximum(tl.sum(good, 0), 1.0), 0.0)
    lanes = tl.zeros([1 << levels], tl.float64)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels)
        n = _column(part, stride, FINITE, at, blocks, 0.0)
        off = tl.where(n > 0, _column(part, stride, MEAN, at, blocks, 0.0) - whole, 0.0)
        lanes += _column(part, stride, M2, at, blocks, 0.0) + n * (off * off)
    return tl.sum(lanes, 0)


@triton.jit
def _write_row(row, part, stride, blocks, sort: tl.constexpr, flags: tl.constexpr, levels: tl.constexpr):
    """Merge the statistics of parts, all in one look at them but for the deviations, and write them."""
    low = tl.full([1 << levels], float("inf"), tl.float64)
    high = -low
    s = tl.zeros([1 << levels], tl.float64)
    c, q, qc, nan, pos, neg, zero, below = s, s, s, s, s, s, s, s
    exponent = tl.full([1 << levels], -600, tl.int32)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels)
        nan += _column(part, stride, NAN, at, blocks, 0.0)
        pos += _column(part, stride, POSINF, at, blocks, 0.0)
        neg += _column(part, stride, NEGINF, at, blocks, 0.0)
        zero += _column(part, stride, ZERO, at, blocks, 0.0)
        if SUBNORMAL & flags:
            below += _column(part, stride, BELOW, at, blocks, 0.0)
        low = tl.minimum(low, _column(part, stride, MIN, at, blocks, float("inf")))
        high = tl.maximum(high, _column(part, stride, MAX, at, blocks, float("-inf")))
        s, lost = two_sum(s, _column(part, stride, SUM, at, blocks, 0.0))
        c += lost
        squares = _column(part, stride, SUMSQ, at, blocks, 0.0)
        if sort == COMPENSATED:
            c += _column(part, stride, SUM_LOST, at, blocks, 0.0)
            own = tl.where(squares > 0, _column(part, stride, EXPONENT, at, blocks, 0.0).to(tl.int32), -600)
            shared = tl.maximum(exponent, own)
            before, here = shrunk(exponent, shared), shrunk(own, shared)
            q, lost = two_sum(q * before * before, squares * here * here)
            qc = qc * before * before + lost + _column(part, stride, SUMSQ_LOST, at, blocks, 0.0) * here * here
            exponent = shared
        else:
            q, lost = two_sum(q, squares)
            qc += lost
    if sort == COMPENSATED:
        total, lost = fold(s, c)
        squares_sum, squares_lost, shared_all = fold_squares(q, qc, exponent)
    else:
        total, lost = tl.sum(s, 0), tl.sum(c, 0)
        squares_sum, squares_lost, shared_all = tl.sum(q, 0), tl.sum(qc, 0), 0.0
    total = tl.where(tl.abs(total) < float("inf"), total + lost, total)
    tl.store(row + ROW_NAN, tl.sum(nan, 0))
    tl.store(row + ROW_POSINF, tl.sum(pos, 0))
    tl.store(row + ROW_NEGINF, tl.sum(neg, 0))
    tl.store(row + ROW_ZERO, tl.sum(zero, 0))
    tl.store(row + ROW_MIN, tl.min(low, 0) + 0.0)  # a zero has no sign here
    tl.store(row + ROW_MAX, tl.max(high, 0) + 0.0)
    tl.store(row + ROW_SUM, _exact_sum(part, stride, blocks, levels) if sort == EXACT else total)
    tl.store(row + ROW_SUMSQ, squares_sum + squares_lost)
    tl.store(row + ROW_EXPONENT, shared_all)
    # unknown, where not asked for
    tl.store(row + ROW_M2, _spread(part, stride, total, blocks, levels) if STD & flags else float("nan"))
    tl.store(row + ROW_BELOW, tl.sum(below, 0) if SUBNORMAL & flags else float("nan"))


@triton.jit(do_not_specialize=["jobs", "how_many", "parts", "blocks"])
def merge_parts(
    jobs: tl.int64,
    how_many: tl.int64,
    parts: tl.int64,
    blocks: tl.int64,
    sort: tl.constexpr,
    flags: tl.constexpr,
    levels: tl.constexpr,
):
    """Merge the parts of a job a program and write its row: 12 partials and the fingerprint (engine.stats.partials)."""
    how_many, stride = how_many.to(tl.int64), blocks.to(tl.int64)
    job = jobs.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.program_id(0)
    part = parts.to(tl.int64) + tl.load(job) * 8
    count, own, row = cell(job, 2, how_many), cell(job, 4, how_many).to(tl.int32), cell(job, 5, how_many)
    integers = row.to(tl.pointer_type(tl.int64))
    if CHECKSUM & flags:
        tl.store(integers + ROW, _integers(part, stride, FINGERPRINT, own, levels))
    numbers = row.to(tl.pointer_type(tl.float64))
    tl.store(numbers + ROW_COUNT, count.to(tl.float64))
    if STATS & flags:
        _write_row(numbers, part, stride, own, sort, flags, levels)
    else:
        for column in tl.static_range(ROW):
            if column != ROW_COUNT:
                tl.store(numbers + column, float("nan"))
