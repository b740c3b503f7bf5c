"""Two Triton kernels: chunks of many tensors to parts, in one pass over memory, and the parts of each tensor to its row.

The numbers are those of `torch_reduce`: the same counts, extremes, exponents and fingerprints bit for bit, sums within the same
bounds. No atomics: which lane adds which element follows from the length of the tensor alone, so the bits are always the same.
A program reduces one chunk. Its lanes add in float64, each at most 256 elements, and are then folded pairwise; float64 and
complex128 are compensated in both (Knuth's two-sum). All addresses and lengths are int64.

A job is a row of `COLUMNS` int64: address, count, elements a chunk, number of its first chunk over all jobs, number of its
chunks, address of the row to write, the three inner sizes and the four strides in elements, and whether those count.
"""

# the body of a kernel is Triton's language: Python's grammar with other types
# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportReturnType=false, reportOptionalMemberAccess=false

import triton
import triton.language as tl

from trainprobe.engine.arrays.triton_elements import elements, share, upper_half
from trainprobe.engine.arrays.triton_sums import add_squares, fold, fold_squares, shrunk, two_sum
from trainprobe.engine.stats import partials

COLUMNS = tl.constexpr(14)
# where a number stands in a part and in a row
_PART = {name: tl.constexpr(i) for i, name in enumerate((*partials.CHUNK, *partials.CHUNK_INTEGERS))}
_ROW = {name: tl.constexpr(i) for i, name in enumerate(partials.PARTIALS)}
WIDTH = tl.constexpr(len(_PART))
NAN, POSINF, NEGINF, ZERO = _PART["nan"], _PART["posinf"], _PART["neginf"], _PART["zero"]
MIN, MAX, M2, EXPONENT, BELOW = _PART["min"], _PART["max"], _PART["m2"], _PART["exponent"], _PART["subnormal"]
SUM, SUM_LOST, SUMSQ, SUMSQ_LOST = _PART["sum"], _PART["sum_lost"], _PART["sumsq"], _PART["sumsq_lost"]
FINITE, MEAN, FINGERPRINT = _PART["finite"], _PART["mean"], _PART["fingerprint"]
UPPER, LOWER = _PART["upper"], _PART["lower"]
ROW_COUNT, ROW_NAN, ROW_POSINF, ROW_NEGINF, ROW_ZERO = (_ROW[name] for name in ("count", "nan", "posinf", "neginf", "zero"))
ROW_MIN, ROW_MAX, ROW_SUM, ROW_SUMSQ = (_ROW[name] for name in ("min", "max", "sum", "sumsq"))
ROW_M2, ROW_EXPONENT, ROW_BELOW = (_ROW[name] for name in ("m2", "exponent", "subnormal"))
STATS, CHECKSUM, STD, SUBNORMAL, ROW = (
    tl.constexpr(x) for x in (partials.STATS, partials.CHECKSUM, partials.STD, partials.SUBNORMAL, partials.WIDTH)
)
COMPENSATED, EXACT = tl.constexpr(2), tl.constexpr(3)  # sorts of dtypes; 0: float32 holds the values, 1: float64 does


@triton.jit
def _deviations(start, stop, mean, address, layout, kind: tl.constexpr, size: tl.constexpr, levels: tl.constexpr):
    """Return sums over the finite elements of a chunk, which the cache still holds: x - mean, and its square."""
    drift = tl.zeros([1 << levels], tl.float64)
    square = drift
    for begin in range(start, stop, 1 << levels):
        at = begin + tl.arange(0, 1 << levels).to(tl.int64)
        inside = at < stop
        _, _, x = elements(address, at, inside, layout, kind, size)
        off = tl.where(inside & (tl.abs(x) < float("inf")), x.to(tl.float64) - mean, 0.0)
        drift += off
        square += off * off
    return tl.sum(drift, 0), tl.sum(square, 0)


@triton.jit
def _tally(x, inside, nan, pos, neg, zero, low, high):
    """Count NaN, infinities and zeros and update the extremes; return them and the elements, non-finite ones replaced by 0."""
    inf = float("inf")
    real = inside & (x == x)
    nan += (inside & (x != x)).to(tl.int32)
    pos += (inside & (x == inf)).to(tl.int32)
    neg += (inside & (x == -inf)).to(tl.int32)
    zero += (inside & (x == 0)).to(tl.int32)
    low = tl.minimum(low, tl.where(real, x, inf))
    high = tl.maximum(high, tl.where(real, x, -inf))
    return nan, pos, neg, zero, low, high, tl.where(inside & (tl.abs(x) < inf), x, 0.0)


@triton.jit
def _write_counts(numbers, nan, pos, neg, zero, low, high, subnormal):
    """Write the counts and the extremes of a part; return how many elements are not finite."""
    n, p, m = tl.sum(nan, 0), tl.sum(pos, 0), tl.sum(neg, 0)
    tl.store(numbers + NAN, n.to(tl.float64))
    tl.store(numbers + POSINF, p.to(tl.float64))
    tl.store(numbers + NEGINF, m.to(tl.float64))
    tl.store(numbers + ZERO, tl.sum(zero, 0).to(tl.float64))
    tl.store(numbers + MIN, tl.min(low, 0).to(tl.float64))
    tl.store(numbers + MAX, tl.max(high, 0).to(tl.float64))
    tl.store(numbers + BELOW, tl.sum(subnormal, 0).to(tl.float64))
    return (n + p + m).to(tl.int64)


@triton.jit
def _write_sums(numbers, s, c, q, qc, exponent, sort: tl.constexpr):
    """Write the sums of a part; return its sum."""
    if sort == COMPENSATED:
        total, lost = fold(s, c)
        squares, squares_lost, shared = fold_squares(q, qc, exponent)
        tl.store(numbers + SUM_LOST, lost)
        tl.store(numbers + SUMSQ_LOST, squares_lost)
        tl.store(numbers + EXPONENT, shared)
    else:
        total, lost = tl.sum(s, 0), 0.0
        squares = tl.sum(q, 0)
        tl.store(numbers + SUM_LOST, 0.0)
        tl.store(numbers + SUMSQ_LOST, 0.0)
        tl.store(numbers + EXPONENT, 0.0)
    tl.store(numbers + SUM, total)
    tl.store(numbers + SUMSQ, squares)
    return total + lost


@triton.jit
def _chunk(
    part,
    start,
    stop,
    address,
    layout,
    kind: tl.constexpr,
    size: tl.constexpr,
    sort: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    levels: tl.constexpr,
):
    """Reduce the elements from start to stop in one sweep, and write the part."""
    lanes = tl.arange(0, 1 << levels).to(tl.int64)
    nan = tl.zeros([1 << levels], tl.int32)
    pos, neg, zero, subnormal, exponent = nan, nan, nan, nan, nan - 600
    low = tl.full([1 << levels], float("inf"), tl.float32 if sort == 0 else tl.float64)
    high = -low
    s = tl.zeros([1 << levels], tl.float64)
    c, q, qc = s, s, s
    upper = tl.zeros([1 << levels], tl.int64)
    lower, total = upper, tl.zeros([1 << levels], tl.uint64)
    for begin in range(start, stop, 1 << levels):
        at = begin + lanes
        inside = at < stop
        word, second, x = elements(address, at, inside, layout, kind, size)
        if CHECKSUM & flags:
            total += share(word, second, lanes, at, inside, size)
        if STATS & flags:
            nan, pos, neg, zero, low, high, kept = _tally(x, inside, nan, pos, neg, zero, low, high)
            if SUBNORMAL & flags:
                subnormal += ((tl.abs(kept) < tiny) & (kept != 0)).to(tl.int32)
            if sort == COMPENSATED:
                s, lost = two_sum(s, kept)
                c += lost
                q, qc, exponent = add_squares(kept, q, qc, exponent)
            else:
                wide = kept.to(tl.float64)
                s += wide
                q += wide * wide
            if sort == EXACT:
                upper += upper_half(word, kind)
                lower += (word & 0xFFFFFFFF).to(tl.int64)
    numbers, integers = part.to(tl.pointer_type(tl.float64)), part.to(tl.pointer_type(tl.int64))
    if CHECKSUM & flags:
        tl.store(integers + FINGERPRINT, tl.sum(total, 0).to(tl.int64, bitcast=True))
    if STATS & flags:
        nonfinite = _write_counts(numbers, nan, pos, neg, zero, low, high, subnormal)
        good = (stop - start - nonfinite).to(tl.float64)
        total_sum = _write_sums(numbers, s, c, q, qc, exponent, sort)
        mean = tl.where(good > 0, total_sum / tl.maximum(good, 1.0), 0.0)
        tl.store(numbers + FINITE, good)
        tl.store(numbers + MEAN, mean)
        if sort == EXACT:
            tl.store(integers + UPPER, tl.sum(upper, 0))
            tl.store(integers + LOWER, tl.sum(lower, 0))
        if STD & flags:
            drift, square = _deviations(start, stop, mean, address, layout, kind, size, levels)
            tl.store(numbers + M2, tl.where(good > 0, tl.maximum(square - drift * drift / tl.maximum(good, 1.0), 0.0), 0.0))


@triton.jit
def _job_of(jobs, how_many, block):
    """Return the address of the job that a chunk belongs to: the last one whose first chunk is not behind it."""
    table = jobs.to(tl.pointer_type(tl.int64))
    low = how_many * 0
    high = how_many
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle * COLUMNS + 3) <= block:
            low = middle
        else:
            high = middle
    return jobs + low * COLUMNS * 8


@triton.jit
def reduce_chunks(
    jobs: tl.int64,
    how_many: tl.int64,
    parts: tl.int64,
    address: tl.int64,
    count: tl.int64,
    chunk: tl.int64,
    n1: tl.int64,
    n2: tl.int64,
    n3: tl.int64,
    s0: tl.int64,
    s1: tl.int64,
    s2: tl.int64,
    s3: tl.int64,
    strided: tl.int64,
    kind: tl.constexpr,
    size: tl.constexpr,
    sort: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    levels: tl.constexpr,
):
    """Reduce a chunk a program. jobs: a table of `how_many`, or 0 where there is one job, which the other arguments tell."""
    block = tl.program_id(0).to(tl.int64)
    first = block * 0
    address, count, chunk, strided = address.to(tl.int64), count.to(tl.int64), chunk.to(tl.int64), strided.to(tl.int64)
    n1, n2, n3, s0 = n1.to(tl.int64), n2.to(tl.int64), n3.to(tl.int64), s0.to(tl.int64)
    s1, s2, s3 = s1.to(tl.int64), s2.to(tl.int64), s3.to(tl.int64)
    if jobs != 0:
        job = _job_of(jobs.to(tl.int64), how_many.to(tl.int64), block).to(tl.pointer_type(tl.int64))
        address, count, chunk, first = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
        n1, n2, n3, s0 = tl.load(job + 6), tl.load(job + 7), tl.load(job + 8), tl.load(job + 9)
        s1, s2, s3, strided = tl.load(job + 10), tl.load(job + 11), tl.load(job + 12), tl.load(job + 13)
    start = (block - first) * chunk
    stop = tl.minimum(start + chunk, count)
    part = parts.to(tl.int64) + block * WIDTH * 8
    layout = (strided, n1, n2, n3, s0, s1, s2, s3)
    _chunk(part, start, stop, address, layout, kind, size, sort, tiny, flags, levels)


@triton.jit
def _column(part, k: tl.constexpr, at, blocks, other):
    """Load a column of parts."""
    return tl.load(part.to(tl.pointer_type(tl.float64)) + at * WIDTH + k, mask=at < blocks, other=other)


@triton.jit
def _added(part, k: tl.constexpr, blocks, levels: tl.constexpr):
    """Add a column of counts over the parts; exact below 2^53."""
    lanes = tl.zeros([1 << levels], tl.float64)
    for begin in range(0, blocks, 1 << levels):
        lanes += _column(part, k, begin + tl.arange(0, 1 << levels).to(tl.int64), blocks, 0.0)
    return tl.sum(lanes, 0)


@triton.jit
def _integers(part, k: tl.constexpr, blocks, levels: tl.constexpr):
    """Add a column of int64 over the parts, modulo 2^64."""
    lanes = tl.zeros([1 << levels], tl.int64)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels).to(tl.int64)
        lanes += tl.load(part.to(tl.pointer_type(tl.int64)) + at * WIDTH + k, mask=at < blocks, other=0)
    return tl.sum(lanes, 0)


@triton.jit
def _exact_sum(part, blocks, levels: tl.constexpr):
    """Add 64-bit integers from the sums of their halves and round once (torch_reduce._exact_sum)."""
    upper = tl.zeros([1 << levels], tl.int64)
    lower = tl.zeros([1 << levels], tl.int64)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels).to(tl.int64)
        halves = part.to(tl.pointer_type(tl.int64)) + at * WIDTH
        low = tl.load(halves + LOWER, mask=at < blocks, other=0)
        upper += tl.load(halves + UPPER, mask=at < blocks, other=0) + (low >> 32)
        lower += low & 0xFFFFFFFF
    high, low_sum = tl.sum(upper, 0), tl.sum(lower, 0)
    high += low_sum >> 32
    low_sum = ((high & 0xFFFFF) << 32) | (low_sum & 0xFFFFFFFF)
    return (high >> 20).to(tl.float64) * (2.0**52) + low_sum.to(tl.float64)


@triton.jit
def _spread(part, total, blocks, levels: tl.constexpr):
    """Add squared deviations of parts from the mean of the whole (Chan, Golub and LeVeque, 1979)."""
    good = _added(part, FINITE, blocks, levels)
    whole = tl.where(good > 0, total / tl.maximum(good, 1.0), 0.0)
    lanes = tl.zeros([1 << levels], tl.float64)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels).to(tl.int64)
        n = _column(part, FINITE, at, blocks, 0.0)
        off = tl.where(n > 0, _column(part, MEAN, at, blocks, 0.0) - whole, 0.0)
        lanes += _column(part, M2, at, blocks, 0.0) + n * (off * off)
    return tl.sum(lanes, 0)


@triton.jit
def _write_row(row, part, count, blocks, sort: tl.constexpr, flags: tl.constexpr, levels: tl.constexpr):
    """Merge the statistics of parts and write them."""
    low = tl.full([1 << levels], float("inf"), tl.float64)
    high = -low
    s = tl.zeros([1 << levels], tl.float64)
    c, q, qc = s, s, s
    exponent = tl.full([1 << levels], -600, tl.int32)
    for begin in range(0, blocks, 1 << levels):
        at = begin + tl.arange(0, 1 << levels).to(tl.int64)
        low = tl.minimum(low, _column(part, MIN, at, blocks, float("inf")))
        high = tl.maximum(high, _column(part, MAX, at, blocks, float("-inf")))
        s, lost = two_sum(s, _column(part, SUM, at, blocks, 0.0))
        c += lost + _column(part, SUM_LOST, at, blocks, 0.0)
        squares = _column(part, SUMSQ, at, blocks, 0.0)
        own = tl.where(squares > 0, _column(part, EXPONENT, at, blocks, 0.0).to(tl.int32), -600)
        shared = tl.maximum(exponent, own)
        before, here = shrunk(exponent, shared), shrunk(own, shared)
        q, lost = two_sum(q * before * before, squares * here * here)
        qc = qc * before * before + lost + _column(part, SUMSQ_LOST, at, blocks, 0.0) * here * here
        exponent = shared
    if sort == COMPENSATED:
        total, lost = fold(s, c)
        squares_sum, squares_lost, shared_all = fold_squares(q, qc, exponent)
    else:
        total, lost = tl.sum(s, 0), tl.sum(c, 0)
        squares_sum, squares_lost, shared_all = tl.sum(q, 0), tl.sum(qc, 0), 0.0
    total = tl.where(tl.abs(total) < float("inf"), total + lost, total)
    tl.store(row + ROW_NAN, _added(part, NAN, blocks, levels))
    tl.store(row + ROW_POSINF, _added(part, POSINF, blocks, levels))
    tl.store(row + ROW_NEGINF, _added(part, NEGINF, blocks, levels))
    tl.store(row + ROW_ZERO, _added(part, ZERO, blocks, levels))
    tl.store(row + ROW_MIN, tl.min(low, 0) + 0.0)  # a zero has no sign here
    tl.store(row + ROW_MAX, tl.max(high, 0) + 0.0)
    tl.store(row + ROW_SUM, _exact_sum(part, blocks, levels) if sort == EXACT else total)
    tl.store(row + ROW_SUMSQ, squares_sum + squares_lost)
    tl.store(row + ROW_EXPONENT, shared_all)
    tl.store(
        row + ROW_M2, _spread(part, total, blocks, levels) if STD & flags else float("nan")
    )  # unknown, where not asked for
    tl.store(row + ROW_BELOW, _added(part, BELOW, blocks, levels) if SUBNORMAL & flags else float("nan"))


@triton.jit
def merge_parts(
    jobs: tl.int64,
    parts: tl.int64,
    count: tl.int64,
    blocks: tl.int64,
    row: tl.int64,
    sort: tl.constexpr,
    flags: tl.constexpr,
    levels: tl.constexpr,
):
    """Merge the parts of a tensor a program and write its row: 12 partials and the fingerprint (engine.stats.partials)."""
    which = tl.program_id(0).to(tl.int64)
    first = which * 0
    count, blocks, row = count.to(tl.int64), blocks.to(tl.int64), row.to(tl.int64)
    if jobs != 0:
        job = (jobs.to(tl.int64) + which * COLUMNS * 8).to(tl.pointer_type(tl.int64))
        count, first, blocks, row = tl.load(job + 1), tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    part = parts.to(tl.int64) + first * WIDTH * 8
    integers = row.to(tl.pointer_type(tl.int64))
    if CHECKSUM & flags:
        tl.store(integers + ROW, _integers(part, FINGERPRINT, blocks, levels))
    numbers = row.to(tl.pointer_type(tl.float64))
    tl.store(numbers + ROW_COUNT, count.to(tl.float64))
    if STATS & flags:
        _write_row(numbers, part, count, blocks, sort, flags, levels)
    else:
        for column in tl.static_range(ROW):
            if column != ROW_COUNT:
                tl.store(numbers + column, float("nan"))
