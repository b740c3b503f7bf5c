"""Elements of a tensor in Triton's language: their bits, their place in memory, the numbers that they are, their fingerprints.

`triton_kernels` says what for.
"""

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
SCALE = tl.constexpr(2.0**120)  # what the values of float8_e4m3fn in `packed` lack
_M = tl.constexpr(0xD6E8FEB86659FD93)  # engine.stats.checksum
_G = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _words(address, at, inside, size: tl.constexpr):
    """Load the elements as unsigned words of `size` bytes; what is not inside is 0."""
    if size == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif size == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif size == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
    else:
        pointer = address.to(tl.pointer_type(tl.uint64))
    return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _float8(word, fraction: tl.constexpr, bias: tl.constexpr):
    """Turn bits into the float32 that sign, exponent and mantissa say; a format's own NaNs are left to the caller."""
    bits = word.to(tl.uint32)
    exponent = (bits & 0x7F) >> fraction
    mantissa = bits & ((1 << fraction) - 1)
    normal = (((exponent + (127 - bias)) << 23) | (mantissa << (23 - fraction))).to(tl.float32, bitcast=True)
    x = tl.where(exponent == 0, mantissa.to(tl.float32) * (2.0 ** (1 - bias - fraction)), normal)
    return tl.where(bits >= 128, -x, x)


@triton.jit
def _small_float(word, kind: tl.constexpr):
    """Turn the bits of an 8-bit float into float32, which holds them exactly."""
    if kind == "float8_e4m3fn":
        x = tl.where((word & 0x7F) == 0x7F, float("nan"), _float8(word, 3, 7))
    elif kind == "float8_e5m2":
        x = _float8(word, 2, 15)
        top = tl.where((word & 3) == 0, tl.where(word >= 128, float("-inf"), float("inf")), float("nan"))
        x = tl.where((word & 0x7C) == 0x7C, top, x)
    elif kind == "float8_e4m3fnuz":
        x = tl.where(word == 0x80, float("nan"), _float8(word, 3, 8))
    elif kind == "float8_e5m2fnuz":
        x = tl.where(word == 0x80, float("nan"), _float8(word, 2, 16))
    else:  # float8_e8m0fnu: a power of two
        bits = word.to(tl.uint32)
        x = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.uint32).to(tl.float32, bitcast=True)
        x = tl.where(bits == 255, float("nan"), x)
    return x


@triton.jit
def _magnitude(re, im):
    """Return sqrt(re² + im²) of float64, scaled where squares would leave the range; infinite if either part is."""
    a, b = tl.abs(re), tl.abs(im)
    big = tl.where(a > b, a, b)
    up = tl.where(big > _LARGE, _DOWN, tl.where(big < _SMALL, _UP, 1.0))
    down = tl.where(big > _LARGE, _UP, tl.where(big < _SMALL, _DOWN, 1.0))
    u, v = a * up, b * up
    root = tl.sqrt(u * u + v * v) * down
    return tl.where((a == float("inf")) | (b == float("inf")), float("inf"), root)


@triton.jit
def _values(word, second, kind: tl.constexpr):
    """Turn words into real numbers: float32 where that holds the dtype exactly, else float64; complex by magnitude."""
    if kind == "bool":
        x = (word != 0).to(tl.float32)
    elif kind == "uint8" or kind == "uint16":
        x = word.to(tl.float32)
    elif kind == "int8":
        x = word.to(tl.int8, bitcast=True).to(tl.float32)
    elif kind == "int16":
        x = word.to(tl.int16, bitcast=True).to(tl.float32)
    elif kind == "uint32" or kind == "uint64":
        x = word.to(tl.float64)
    elif kind == "int32":
        x = word.to(tl.int32, bitcast=True).to(tl.float64)
    elif kind == "int64":
        x = word.to(tl.int64, bitcast=True).to(tl.float64)
    elif kind == "float16":
        x = word.to(tl.float16, bitcast=True).to(tl.float32)
    elif kind == "bfloat16":
        x = (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif kind == "float32":
        x = word.to(tl.float32, bitcast=True)
    elif kind == "float64":
        x = word.to(tl.float64, bitcast=True)
    elif kind == "complex32":
        re = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float64)
        x = _magnitude(re, (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float64))
    elif kind == "complex64":
        re = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True).to(tl.float64)
        x = _magnitude(re, (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True).to(tl.float64))
    elif kind == "complex128":
        x = _magnitude(word.to(tl.float64, bitcast=True), second.to(tl.float64, bitcast=True))
    else:
        x = _small_float(word, kind)
    return x


@triton.jit
def _hashed(j):
    """Return K of numbers (engine.stats.checksum)."""
    x = (j + 1).to(tl.uint64) * _G
    x = (x ^ (x >> 32)) * _M
    x = (x ^ (x >> 32)) * _M
    return x ^ (x >> 32)


@triton.jit
def start_of(start, count, n1, n2, n3):
    """Return where a chunk starts in each of four dimensions, or 0, 0, 0 and the start where 31 bits hold all places."""
    i0, i1, i2, i3 = start * 0, start * 0, start * 0, start
    if count > 0x7FFFFFFF:
        i3, i2 = start % n3, start // n3
        i2, i1 = i2 % n2, i2 // n2
        i1, i0 = i1 % n1, i1 // n1
    return i0, i1.to(tl.uint32), i2.to(tl.uint32), i3.to(tl.uint32)


@triton.jit
def _place_of(offset, layout):
    """Return the place in memory, in elements, of row-major offsets in a chunk; divides numbers of 32 bits.

    layout: three inner sizes, four strides, and where the chunk starts (`start_of`).
    """
    n1, n2, n3, s0, s1, s2, s3, i0, i1, i2, i3 = layout
    at3 = i3 + offset.to(tl.uint32)
    at2 = i2 + at3 // n3
    at1 = i1 + at2 // n2
    at0 = i0 + (at1 // n1).to(tl.int64)
    return at0 * s0 + (at1 % n1).to(tl.int64) * s1 + (at2 % n2).to(tl.int64) * s2 + (at3 % n3).to(tl.int64) * s3


@triton.jit
def elements(address, start, offset, inside, strided, layout, kind: tl.constexpr, size: tl.constexpr):
    """Load the elements at offsets in a chunk: their words (two of complex128, else the same twice), and their values."""
    where = start + offset
    if strided != 0:
        where = _place_of(offset, layout)
    if size == 16:
        word = _words(address, 2 * where, inside, 8)
        second = _words(address, 2 * where + 1, inside, 8)
    else:
        word = _words(address, where, inside, size)
        second = word
    return word, second, _values(word, second, kind)


@triton.jit
def vectors(address, start, first, strided, layout, size: tl.constexpr, rows: tl.constexpr):
    """Load 16 bytes a row, uint32 [4, rows], from offset `first` of a chunk on; 16 divides where each row is in memory."""
    each: tl.constexpr = 16 // size
    row = tl.arange(0, rows)
    where = (start + first) // each + row
    if strided != 0:
        where = _place_of(first + row * each, layout) // each
    words = address.to(tl.pointer_type(tl.uint32)) + (tl.arange(0, 4)[:, None] + (where * 4)[None, :])
    return tl.load(tl.max_contiguous(tl.multiple_of(words, [16, 16]), [4, 1]))


@triton.jit
def packed(word, k: tl.constexpr, kind: tl.constexpr, size: tl.constexpr):
    """Return the bits and the values of the elements number k of words that hold 4 // size each.

    The values of float8_e4m3fn are multiplied by 2^-120 (`SCALE`), and its NaN is 480 times that.
    """
    bits = word if size == 4 else (word >> (8 * size * k)) & ((1 << (8 * size)) - 1)
    if kind == "float32":
        x = word.to(tl.float32, bitcast=True)
    elif kind == "bfloat16":
        x = ((word << 16) if k == 0 else (word & 0xFFFF0000)).to(tl.float32, bitcast=True)
    elif kind == "float8_e4m3fn":  # the exponent and the mantissa to where float32 has them
        top = word << (24 - 8 * k)
        x = ((top & 0x80000000) | ((top >> 4) & 0x07F00000)).to(tl.float32, bitcast=True)
    elif kind == "float8_e5m2":  # a float16 without its last eight bits
        x = (bits << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        narrow = bits.to(tl.uint8 if size == 1 else tl.uint16)
        x = _values(narrow, narrow, kind)
    return bits, x


@triton.jit
def filled(word, size: tl.constexpr):
    """Return numbers that have a 1 in the last bit of each element of a word that is more than its first bit."""
    rest: tl.constexpr = 0x7FFF7FFF if size == 2 else 0x7F7F7F7F
    return ((((word & rest) + rest) & (0xFFFFFFFF - rest)) >> (8 * size - 1)).to(tl.int32)


@triton.jit
def filled_in(added, size: tl.constexpr):
    """Return how many elements were not 0, from at most 255 numbers of `filled` that were added."""
    if size == 2:
        many = (added & 0xFFFF) + (added >> 16)
    else:
        many = (added & 0xFF) + ((added >> 8) & 0xFF) + ((added >> 16) & 0xFF) + (added >> 24)
    return many


@triton.jit
def _column_keys(lane, part: tl.constexpr, size: tl.constexpr):
    """Return the first half of the keys of word number `part` of elements at these lanes plus any multiple of 256."""
    return _hashed((lane * max(size // 4, 1) + part) & 255)


@triton.jit
def row_keys(start, first, size: tl.constexpr, rows: tl.constexpr, row: tl.constexpr):
    """Return the second half of the keys of the elements from offset `first` of a chunk on, [1, rows], `row` elements each."""
    at = start + first + tl.arange(0, rows) * row
    return _hashed(256 + ((at * max(size // 4, 1)) >> 8))[None, :]


@triton.jit
def _term(word, column, row):
    """Return what words of 32 bits add to the fingerprint, without its constant; column, row: the halves of their keys."""
    low = word ^ (column.to(tl.uint32) ^ row.to(tl.uint32))
    high = ((word << 16) | (word >> 16)) ^ ((column >> 32).to(tl.uint32) ^ (row >> 32).to(tl.uint32))
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def share(word, second, lane, row, size: tl.constexpr):
    """Return the shares of elements in the fingerprint, without its constant. lane: in the tile. row: see `row_keys`."""
    if size < 8:
        terms = _term(word.to(tl.uint32), _column_keys(lane, 0, size), row)
    else:
        terms = _term(word.to(tl.uint32), _column_keys(lane, 0, size), row)
        terms += _term((word >> 32).to(tl.uint32), _column_keys(lane, 1, size), row)
        if size == 16:
            terms += _term(second.to(tl.uint32), _column_keys(lane, 2, size), row)
            terms += _term((second >> 32).to(tl.uint32), _column_keys(lane, 3, size), row)
    return terms


@triton.jit
def constants(elements, size: tl.constexpr):
    """Return the constants of the shares of so many elements."""
    return (elements * max(size // 4, 1)).to(tl.uint64) * _G


@triton.jit
def upper_half(word, kind: tl.constexpr):
    """Return the high 32 bits of 64-bit integers, with their sign."""
    return (word >> 32).to(tl.int64) if kind == "uint64" else word.to(tl.int64, bitcast=True) >> 32
