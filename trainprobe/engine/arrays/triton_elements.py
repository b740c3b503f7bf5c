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
def column_keys(lanes, part: tl.constexpr, size: tl.constexpr):
    """Return the first half of the keys of word number `part` of elements at these lanes plus any multiple of 256."""
    return _hashed((lanes * max(size // 4, 1) + part) & 255)


@triton.jit
def _term(word, column, place):
    """Return what words of 32 bits at these places add to the fingerprint (engine.stats.checksum)."""
    key = column ^ _hashed(256 + (place >> 8))
    word = word.to(tl.uint32)
    low = word ^ (key & 0xFFFFFFFF).to(tl.uint32)
    high = ((word << 16) | (word >> 16)) ^ (key >> 32).to(tl.uint32)
    return low.to(tl.uint64) * high.to(tl.uint64) + _G


@triton.jit
def _address_of(at, layout):
    """Return the place in memory, in elements, of row-major places. layout: strided, three inner sizes, four strides."""
    _, n1, n2, n3, s0, s1, s2, s3 = layout
    i3, rest = at % n3, at // n3
    i2, rest = rest % n2, rest // n2
    return (rest // n1) * s0 + (rest % n1) * s1 + i2 * s2 + i3 * s3


@triton.jit
def elements(address, at, inside, layout, kind: tl.constexpr, size: tl.constexpr):
    """Load the elements at row-major places: their words (two of complex128, else the same twice) and their values."""
    where = at
    if layout[0] != 0:
        where = _address_of(at, layout)
    if size == 16:
        word = _words(address, 2 * where, inside, 8)
        second = _words(address, 2 * where + 1, inside, 8)
    else:
        word = _words(address, where, inside, size)
        second = word
    return word, second, _values(word, second, kind)


@triton.jit
def share(word, second, lanes, at, inside, size: tl.constexpr):
    """Return the shares in the fingerprint of the elements at these places, which are the lanes plus a multiple of 256."""
    if size < 8:
        terms = _term(word, column_keys(lanes, 0, size), at)
    else:
        first = at * (size // 4)
        terms = _term(word & 0xFFFFFFFF, column_keys(lanes, 0, size), first)
        terms += _term(word >> 32, column_keys(lanes, 1, size), first)
        if size == 16:
            terms += _term(second & 0xFFFFFFFF, column_keys(lanes, 2, size), first)
            terms += _term(second >> 32, column_keys(lanes, 3, size), first)
    return tl.where(inside, terms, 0)


@triton.jit
def upper_half(word, kind: tl.constexpr):
    """Return the high 32 bits of 64-bit integers, with their sign."""
    return (word >> 32).to(tl.int64) if kind == "uint64" else word.to(tl.int64, bitcast=True) >> 32
