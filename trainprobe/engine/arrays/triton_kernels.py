"""The Triton kernel that reduces chunks of many tensors to parts, in one pass over memory; `triton_merge` joins the parts.

The numbers are those of `torch_reduce`: the same counts, extremes, exponents and fingerprints bit for bit, sums within the same
bounds. No atomics: which lane adds which element follows from the length of the tensor alone, so the bits are always the same.
A program reduces one chunk. Its lanes add in float64, each at most 256 elements, and are then folded pairwise; float64 and
complex128 are compensated in both (Knuth's two-sum).

Of numbers that float32 holds, a program loads whole tiles 16 bytes a thread where the addresses allow it, and takes them to be
finite: a sum in float64 tells afterwards whether they were. Then, and for what is no whole tile, it looks at each element. Both
ways add the same elements to the same lanes in the same order.

A table of jobs is int64 [COLUMNS, jobs]: number of the first chunk over all jobs, address, count, elements a chunk, number of
chunks, address of the row to write, three inner sizes, four strides in elements, and a mode: 1 where those count, and 2 more
where 16 divides the address of every 16 bytes. Parts are int64 [WIDTH, chunks].
"""

# the body of a kernel is Triton's language: Python's grammar with other types
# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportReturnType=false, reportOptionalMemberAccess=false

import triton
import triton.language as tl

from trainprobe.engine.arrays.triton_elements import (
    SCALE,
    constants,
    elements,
    filled,
    filled_in,
    packed,
    row_keys,
    share,
    start_of,
    upper_half,
    vectors,
)
from trainprobe.engine.arrays.triton_sums import add_squares, fold, fold_squares, two_sum
from trainprobe.engine.stats import partials

COLUMNS = tl.constexpr(14)
# where a number stands in a part
PART = {name: tl.constexpr(i) for i, name in enumerate((*partials.CHUNK, *partials.CHUNK_INTEGERS))}
WIDTH = tl.constexpr(len(PART))
NAN, POSINF, NEGINF, ZERO = PART["nan"], PART["posinf"], PART["neginf"], PART["zero"]
MIN, MAX, M2, EXPONENT, BELOW = PART["min"], PART["max"], PART["m2"], PART["exponent"], PART["subnormal"]
SUM, SUM_LOST, SUMSQ, SUMSQ_LOST = PART["sum"], PART["sum_lost"], PART["sumsq"], PART["sumsq_lost"]
FINITE, MEAN, FINGERPRINT = PART["finite"], PART["mean"], PART["fingerprint"]
UPPER, LOWER = PART["upper"], PART["lower"]
STATS, CHECKSUM, STD, SUBNORMAL = (
    tl.constexpr(x) for x in (partials.STATS, partials.CHECKSUM, partials.STD, partials.SUBNORMAL)
)
COMPENSATED, EXACT = tl.constexpr(2), tl.constexpr(3)  # sorts of dtypes; 0: float32 holds the values, 1: float64 does
AT_ONCE, LOOKED_AT = tl.constexpr(4), tl.constexpr(512)  # tiles loaded before the first is added; jobs looked through at once


@triton.jit
def _lanes(rows: tl.constexpr):
    """Return the numbers of the lanes, [4, rows]."""
    return tl.arange(0, 4)[:, None] + (tl.arange(0, rows) * 4)[None, :]


@triton.jit
def _all(x):
    """Add all lanes."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def _flat(x, rows: tl.constexpr):
    return tl.reshape(x, [4 * rows])


@triton.jit
def _sweep(
    word,
    sums,
    start,
    first,
    kind: tl.constexpr,
    size: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    rows: tl.constexpr,
):
    """Add the packed elements of a tile, which are taken to be finite, to the lanes."""
    s, q, low, high, zero, below, total = sums
    each: tl.constexpr = 4 // size
    least: tl.constexpr = tiny / SCALE if kind == "float8_e4m3fn" else tiny
    row = row_keys(start, first, size, rows, 4 * each)
    if (STATS & flags) and size < 4 and tiny > 0:
        zero += filled(word, size)
    for k in tl.static_range(each):
        bits, x = packed(word, k, kind, size)
        if CHECKSUM & flags:
            total += share(bits, bits, _lanes(rows) * each + k, row, size)
        if STATS & flags:
            low, high = tl.minimum(low, x), tl.maximum(high, x)
            if size == 4 or tiny == 0:
                zero += (x == 0).to(tl.int32)
            if SUBNORMAL & flags:
                below += ((tl.abs(x) < least) & (x != 0)).to(tl.int32)
            wide = x.to(tl.float64)
            s += wide
            q = tl.fma(wide, wide, q)  # the square is exact, so that this rounds as often as a multiplication and an addition
    return s, q, low, high, zero, below, total


@triton.jit
def _deviations(
    length,
    whole,
    mean,
    start,
    address,
    strided,
    layout,
    kind: tl.constexpr,
    size: tl.constexpr,
    sort: tl.constexpr,
    rows: tl.constexpr,
):
    """Return sums over the finite elements of a chunk, which the cache still holds: x - mean, and its square."""
    drift = tl.zeros([4, rows], tl.float64)
    square = drift
    each: tl.constexpr = 4 // size if sort == 0 else 1
    if sort == 0:
        for first in range(0, whole, rows * 4 * each):
            word = vectors(address, start, first, strided, layout, size, rows)
            for k in tl.static_range(each):
                _, x = packed(word, k, kind, size)
                off = (x * SCALE if kind == "float8_e4m3fn" else x).to(tl.float64) - mean
                drift += off
                square += off * off
    for first in range(whole, length, rows * 4 * each):
        for k in tl.static_range(each):
            offset = first + _lanes(rows) * each + k
            inside = offset < length
            _, _, x = elements(address, start, offset, inside, strided, layout, kind, size)
            off = tl.where(inside & (tl.abs(x) < float("inf")), x.to(tl.float64) - mean, 0.0)
            drift += off
            square += off * off
    return _all(drift), _all(square)


@triton.jit
def _write_counts(numbers, stride, nan, pos, neg, zero, low, high, below, flags: tl.constexpr):
    """Write the counts and the extremes of a part; return how many elements are not finite."""
    odd = _all(nan.to(tl.int64) + (pos.to(tl.int64) << 20) + (neg.to(tl.int64) << 40))  # a chunk has at most 2^18 elements
    n, p, m = odd & 0xFFFFF, (odd >> 20) & 0xFFFFF, odd >> 40
    tl.store(numbers + NAN * stride, n.to(tl.float64))
    tl.store(numbers + POSINF * stride, p.to(tl.float64))
    tl.store(numbers + NEGINF * stride, m.to(tl.float64))
    tl.store(numbers + ZERO * stride, _all(zero).to(tl.float64))
    tl.store(numbers + MIN * stride, tl.min(tl.min(low, 0), 0).to(tl.float64))
    tl.store(numbers + MAX * stride, tl.max(tl.max(high, 0), 0).to(tl.float64))
    if SUBNORMAL & flags:
        tl.store(numbers + BELOW * stride, _all(below).to(tl.float64))
    return n + p + m


@triton.jit
def _write_sums(numbers, stride, s, c, q, qc, exponent, sort: tl.constexpr, rows: tl.constexpr):
    """Write the sums of a part; return its sum."""
    if sort == COMPENSATED:
        total, lost = fold(_flat(s, rows), _flat(c, rows))
        squares, squares_lost, shared = fold_squares(_flat(q, rows), _flat(qc, rows), _flat(exponent, rows))
        tl.store(numbers + SUM_LOST * stride, lost)
        tl.store(numbers + SUMSQ_LOST * stride, squares_lost)
        tl.store(numbers + EXPONENT * stride, shared)
    else:
        total, lost, squares = _all(s), 0.0, _all(q)
    tl.store(numbers + SUM * stride, total)
    tl.store(numbers + SUMSQ * stride, squares)
    return total + lost


@triton.jit
def _write_deviations(numbers, stride, finite, mean, drift, square):
    """Write what the deviations of a part are merged by."""
    tl.store(numbers + FINITE * stride, finite)
    tl.store(numbers + MEAN * stride, mean)
    m2 = tl.maximum(square - drift * drift / tl.maximum(finite, 1.0), 0.0)
    tl.store(numbers + M2 * stride, tl.where(finite > 0, m2, 0.0))


@triton.jit
def _whole_tiles(
    sums,
    whole,
    start,
    address,
    strided,
    layout,
    kind: tl.constexpr,
    size: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    rows: tl.constexpr,
):
    """Add the elements up to `whole` to the lanes. Return how many of them hold, none if one was not finite, and the lanes."""
    s, q, low, high, zero, below, total = sums
    tile: tl.constexpr = 16 // size * rows
    for first in range(0, whole, AT_ONCE * tile):
        w0 = vectors(address, start, first, strided, layout, size, rows)
        w1 = vectors(address, start, first + tile, strided, layout, size, rows)
        w2 = vectors(address, start, first + 2 * tile, strided, layout, size, rows)
        w3 = vectors(address, start, first + 3 * tile, strided, layout, size, rows)
        added = _sweep(w0, (s, q, low, high, zero, below, total), start, first, kind, size, tiny, flags, rows)
        added = _sweep(w1, added, start, first + tile, kind, size, tiny, flags, rows)
        added = _sweep(w2, added, start, first + 2 * tile, kind, size, tiny, flags, rows)
        added = _sweep(w3, added, start, first + 3 * tile, kind, size, tiny, flags, rows)
        s, q, low, high, zero, below, total = added
    held = whole
    if STATS & flags:
        if size < 4 and tiny > 0:
            zero = whole // (4 * rows) - filled_in(zero, size)
        odd = ~(tl.abs(s) < float("inf"))
        if kind == "float8_e4m3fn":
            s, q, low, high = s * SCALE, q * (SCALE * SCALE), low * SCALE, high * SCALE
            odd |= (low <= -480) | (high >= 480)
        again = tl.max(tl.max(odd.to(tl.int32), 0), 0) != 0
        held = tl.where(again, 0, whole)
        s, q = tl.where(again, 0.0, s), tl.where(again, 0.0, q)
        low, high = tl.where(again, float("inf"), low), tl.where(again, float("-inf"), high)
        zero, below = tl.where(again, 0, zero), tl.where(again, 0, below)
    return held, s, q, low, high, zero, below, total


@triton.jit
def _count(x, inside, nan, pos, neg, zero, below, low, high, tiny: tl.constexpr, flags: tl.constexpr):
    """Count what elements are and update the extremes; return them and the elements, 0 for what is not finite."""
    real = inside & (x == x)
    nan += (inside & (x != x)).to(tl.int32)
    pos += (inside & (x == float("inf"))).to(tl.int32)
    neg += (inside & (x == float("-inf"))).to(tl.int32)
    zero += (inside & (x == 0)).to(tl.int32)
    low = tl.minimum(low, tl.where(real, x, float("inf")))
    high = tl.maximum(high, tl.where(real, x, float("-inf")))
    kept = tl.where(inside & (tl.abs(x) < float("inf")), x, 0.0)
    if SUBNORMAL & flags:
        below += ((tl.abs(kept) < tiny) & (kept != 0)).to(tl.int32)
    return nan, pos, neg, zero, below, low, high, kept


@triton.jit
def _chunk(
    part,
    stride,
    start,
    length,
    address,
    mode,
    layout,
    kind: tl.constexpr,
    size: tl.constexpr,
    sort: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    rows: tl.constexpr,
):
    """Reduce a chunk and write its part: whole tiles as if all were finite, then the rest, or all, element by element."""
    strided = mode & 1
    nan = tl.zeros([4, rows], tl.int32)
    pos, neg, zero, below, exponent = nan, nan, nan, nan, nan - 600
    low = tl.full([4, rows], float("inf"), tl.float32 if sort == 0 else tl.float64)
    high = -low
    s = tl.zeros([4, rows], tl.float64)
    c, q, qc = s, s, s
    upper = tl.zeros([4, rows], tl.int64)
    lower, total = upper, tl.zeros([4, rows], tl.uint64)
    each: tl.constexpr = 4 // size if sort == 0 else 1
    tile: tl.constexpr = rows * 4 * each
    whole = length * 0
    begin = whole
    if sort == 0:
        if mode >= 2:
            whole = length // (AT_ONCE * tile) * (AT_ONCE * tile)
        sums = (s, q, low, high, zero, below, total)
        begin, s, q, low, high, zero, below, total = _whole_tiles(
            sums, whole, start, address, strided, layout, kind, size, tiny, flags, rows
        )
    for first in range(begin, length, tile):
        row = row_keys(start, first, size, rows, 4 * each)
        for k in tl.static_range(each):
            lane = _lanes(rows) * each + k
            offset = first + lane
            inside = offset < length
            word, second, x = elements(address, start, offset, inside, strided, layout, kind, size)
            if CHECKSUM & flags:
                total += tl.where(inside & (offset >= whole), share(word, second, lane, row, size), 0)
            if STATS & flags:
                nan, pos, neg, zero, below, low, high, kept = _count(
                    x, inside, nan, pos, neg, zero, below, low, high, tiny, flags
                )
                if sort == COMPENSATED:
                    s, lost = two_sum(s, kept)
                    c += lost
                    q, qc, exponent = add_squares(kept, q, qc, exponent)
                else:
                    wide = kept.to(tl.float64)
                    s += wide
                    q = tl.fma(wide, wide, q) if sort == 0 else q + wide * wide
                if sort == EXACT:
                    upper += upper_half(word, kind)
                    lower += (word & 0xFFFFFFFF).to(tl.int64)
    numbers, integers = part.to(tl.pointer_type(tl.float64)), part.to(tl.pointer_type(tl.int64))
    if CHECKSUM & flags:
        fingerprint = _all(total) + constants(length, size)
        tl.store(integers + FINGERPRINT * stride, fingerprint.to(tl.int64, bitcast=True))
    if STATS & flags:
        finite = length - _write_counts(numbers, stride, nan, pos, neg, zero, low, high, below, flags)
        total_sum = _write_sums(numbers, stride, s, c, q, qc, exponent, sort, rows)
        if sort == EXACT:
            tl.store(integers + UPPER * stride, _all(upper))
            tl.store(integers + LOWER * stride, _all(lower))
        if STD & flags:
            good = finite.to(tl.float64)
            mean = tl.where(good > 0, total_sum / tl.maximum(good, 1.0), 0.0)
            drift, square = _deviations(length, begin, mean, start, address, strided, layout, kind, size, sort, rows)
            _write_deviations(numbers, stride, good, mean, drift, square)


@triton.jit
def _job_of(firsts, how_many, block):
    """Return the number of the job that a chunk belongs to: the last one whose first chunk is not behind it."""
    before = tl.zeros([LOOKED_AT], tl.int32)
    for begin in range(0, how_many, LOOKED_AT):
        at = begin + tl.arange(0, LOOKED_AT)
        before += (tl.load(firsts + at, mask=at < how_many, other=1 << 62) <= block).to(tl.int32)
    return tl.sum(before, 0) - 1


@triton.jit(do_not_specialize=["jobs", "how_many", "parts", "blocks"])
def reduce_chunks(
    jobs: tl.int64,
    how_many: tl.int64,
    parts: tl.int64,
    blocks: tl.int64,
    kind: tl.constexpr,
    size: tl.constexpr,
    sort: tl.constexpr,
    tiny: tl.constexpr,
    flags: tl.constexpr,
    rows: tl.constexpr,
):
    """Reduce a chunk a program. jobs: a table of `how_many`. parts: of as many `blocks` as there are programs."""
    block = tl.program_id(0).to(tl.int64)
    jobs, how_many = jobs.to(tl.int64), how_many.to(tl.int64)
    table = jobs.to(tl.pointer_type(tl.int64))
    job = table + _job_of(table, how_many, block)
    first, address, count, chunk = (
        tl.load(job),
        cell(job, 1, how_many),
        cell(job, 2, how_many),
        cell(job, 3, how_many),
    )
    mode = cell(job, 13, how_many)
    start = (block - first) * chunk
    length = tl.minimum(chunk, count - start).to(tl.int32)
    n1, n2, n3, s0 = (
        cell(job, 6, how_many),
        cell(job, 7, how_many),
        cell(job, 8, how_many),
        cell(job, 9, how_many),
    )
    s1, s2, s3 = cell(job, 10, how_many), cell(job, 11, how_many), cell(job, 12, how_many)
    i0, i1, i2, i3 = start_of(start, count, n1, n2, n3)
    n1, n2, n3 = n1.to(tl.uint32), n2.to(tl.uint32), n3.to(tl.uint32)
    layout = (n1, n2, n3, s0, s1, s2, s3, i0, i1, i2, i3)
    _chunk(
        parts.to(tl.int64) + block * 8,
        blocks.to(tl.int64),
        start,
        length,
        address,
        mode,
        layout,
        kind,
        size,
        sort,
        tiny,
        flags,
        rows,
    )


@triton.jit
def cell(job, column: tl.constexpr, how_many):
    """Load a number of a job from the table."""
    return tl.load(job + column * how_many)
