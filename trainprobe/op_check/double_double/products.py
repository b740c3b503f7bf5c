"""Products of matrices to about 2⁻¹⁰⁰ of the largest number in a row times the largest in a column.

Both factors are cut into slices of so few bits that float64 adds up a product of two slices without any rounding, in
whatever order (Ozaki, Ogita, Oishi and Rump 2012). The exact products are added as pairs.
"""

from __future__ import annotations

import math

import torch

from trainprobe.op_check.double_double.arithmetic import Pair, Tensor, add, exactly, finite, times_power_of_two

_BITS = 106


def _scaled(a: Pair, dim: int) -> tuple[Pair, Tensor]:
    """Return rows whose largest number lies below 1, and the powers of two that they were divided by."""
    high, low = (x.nan_to_num(0.0, 0.0, 0.0) for x in a)
    _, exponent = torch.frexp(high.abs().amax(dim, True)) if high.numel() else (None, high.sum(dim, True).int())
    return (torch.ldexp(high, -exponent), torch.ldexp(low, -exponent)), exponent


def _slices(a: Pair, bits: int) -> list[Tensor]:
    """Return numbers whose sum is a, each below 1: of the n-th, all are multiples of 2^(−n·bits) and none has more bits."""
    high, low = a
    found: list[Tensor] = []
    for n in range(1, math.ceil(_BITS / bits) + 1):
        shift = 1.5 * 2.0 ** (52 - n * bits)
        part = (high + shift) - shift
        found.append(part)
        high = high - part
        high, low = high + low, low - ((high + low) - high)
        if not bool((high != 0).any()):
            break
    return found


def product(a: Pair, b: Pair) -> Pair:
    """Return the product of matrices, or of stacks of them of the same shape."""
    plain = torch.matmul(a[0], b[0])
    length = a[0].shape[-1]
    if plain.numel() == 0 or length == 0:
        return exactly(plain)
    bits = (52 - math.ceil(math.log2(max(2, length)))) // 2
    (left, left_exponent), (right, right_exponent) = _scaled(a, -1), _scaled(b, -2)
    lefts, rights = _slices(left, bits), _slices(right, bits)
    most = math.ceil(_BITS / bits)
    total = exactly(torch.zeros_like(plain))
    for order in range(min(len(lefts) + len(rights) - 2, most), -1, -1):  # the smallest first
        for i, part in enumerate(lefts):
            if 0 <= order - i < len(rights):
                total = add(total, exactly(torch.matmul(part, rights[order - i])))
    exponents = left_exponent + right_exponent
    half = exponents // 2
    high, low = times_power_of_two(total, torch.exp2(half.to(torch.float64)))
    high, low = times_power_of_two((high, low), torch.exp2((exponents - half).to(torch.float64)))
    return finite(high, low, plain)
