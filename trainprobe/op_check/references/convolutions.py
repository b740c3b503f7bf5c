"""Convolutions and poolings, as sums over the window's places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainprobe.op_check.references import Sum, formula
from trainprobe.op_check.references.primitives import Tensor, cat, matmul, sum


def _each(x: Any, n: int) -> list[int]:
    return [int(x)] * n if isinstance(x, int) else [int(i) for i in x] * (n if len(x) == 1 else 1)


def _padded(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (before, after) in enumerate(padding, start=x.ndim - len(padding)):
        shape = [*x.shape]
        parts = [x]
        if before:
            parts.insert(0, x.new_full([*shape[:dim], before, *shape[dim + 1 :]], 0.0))
        if after:
            parts.append(x.new_full([*shape[:dim], after, *shape[dim + 1 :]], 0.0))
        x = cat(parts, dim) if len(parts) > 1 else x
    return x


def _places(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Iterator[Tensor]:
    """Yield, for each place in the window, what lies there for all outputs."""
    n = len(kernel)
    out = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(x.shape[-n:], kernel, stride, dilation, strict=True)]
    for offset in itertools.product(*map(range, kernel)):
        part = x
        for i in range(n):
            begin = offset[i] * dilation[i]
            dim = part.ndim - n + i
            part = part[(slice(None),) * dim + (slice(begin, begin + (out[i] - 1) * stride[i] + 1, stride[i]),)]
        yield part


def _window(input: Tensor, weight: Tensor, *given: Any, **named: Any) -> int:
    return weight[0].numel()


@formula("conv1d", "conv2d", "conv3d", adds=Sum(_window, ("bias",)))
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Σ over channels and window of w · x; the weight is [out, in / groups, …window]."""
    n = weight.ndim - 2
    batched = input if input.ndim == n + 2 else input.unsqueeze(0)
    steps, spread, window = _each(stride, n), _each(dilation, n), [*weight.shape[2:]]
    if padding == "same":
        needed = [d * (k - 1) for d, k in zip(spread, window, strict=True)]
        sides = [(total // 2, total - total // 2) for total in needed]
    else:
        sides = [(p, p) for p in ([0] * n if padding == "valid" else _each(padding, n))]
    x = _padded(batched, sides)
    seen = cat([part.unsqueeze(2) for part in _places(x, window, steps, spread)], 2)  # [N, C, window, …out]
    size = seen.shape[3:]
    per_group = input.shape[-n - 1] // groups
    seen = seen.reshape(seen.shape[0], groups, per_group * seen.shape[2], -1)
    kernel = weight.reshape(groups, weight.shape[0] // groups, -1)
    out = matmul(kernel.unsqueeze(0), seen).reshape(seen.shape[0], weight.shape[0], *size)
    if bias is not None:
        out = out + bias.reshape(1, -1, *[1] * n)
    return out if input.ndim == n + 2 else out.squeeze(0)


def _transposed_window(input: Tensor, weight: Tensor, *given: Any, groups: int = 1, **named: Any) -> int:
    groups = given[4] if len(given) > 4 else groups
    return weight.shape[0] // groups * math.prod(weight.shape[2:])


@formula("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", adds=Sum(_transposed_window, ("bias",)), wide=True)
def transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The convolution of the input, with zeros between its elements, and the mirrored kernel.

    The weight is [in, out / groups, …window].

    Raises NotImplementedError where the padding is larger than the window reaches.
    """
    n = weight.ndim - 2
    x = input if input.ndim == n + 2 else input.unsqueeze(0)
    window, spread = [*weight.shape[2:]], _each(dilation, n)
    reach = [d * (k - 1) - p for d, k, p in zip(spread, window, _each(padding, n), strict=True)]
    if min(reach) < 0:
        raise NotImplementedError("a padding beyond the window has no formula here")
    for dim, step in enumerate(_each(stride, n), start=2):
        x = _between(x, dim, step)
    x = _padded(x, [(r, r + more) for r, more in zip(reach, _each(output_padding, n), strict=True)])
    kernel = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
    kernel = kernel.reshape(-1, weight.shape[0] // groups, *window).flip([*range(2, n + 2)])
    out = convolution(x, kernel, bias, 1, 0, dilation, groups)
    return out if input.ndim == n + 2 else out.squeeze(0)


def _between(x: Tensor, dim: int, step: int) -> Tensor:
    """Put step − 1 zeros between the elements along a dimension."""
    if step == 1:
        return x
    apart = x.unsqueeze(dim + 1)
    zeros = apart.new_zeros([1]).expand(*[step - 1 if i == dim + 1 else size for i, size in enumerate(apart.shape)])
    spaced = cat([apart, zeros], dim + 1).flatten(dim, dim + 1)
    return spaced.narrow(dim, 0, (x.shape[dim] - 1) * step + 1)


def _average(
    n: int,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if ceil_mode:
        raise NotImplementedError("pooling with ceil_mode has no formula here")
    window = _each(kernel_size, n)
    steps = window if stride is None or stride == [] else _each(stride, n)
    sides = [(p, p) for p in _each(padding, n)]
    total = sum(cat([p.unsqueeze(0) for p in _places(_padded(input, sides), window, steps, [1] * n)], 0), 0)
    if divisor_override:
        return total / divisor_override
    if count_include_pad:
        return total / math.prod(window)
    counts = _places(_padded(input.detach() * 0 + 1, sides), window, steps, [1] * n)
    return total / sum(cat([p.unsqueeze(0) for p in counts], 0), 0)


@formula("avg_pool1d")
def avg_pool1d(input: Tensor, *given: Any, **named: Any) -> Tensor:
    """The mean of each window along the last dimension."""
    return _average(1, input, *given, **named)


@formula("avg_pool2d")
def avg_pool2d(input: Tensor, *given: Any, **named: Any) -> Tensor:
    """The mean of each window over the last two dimensions."""
    return _average(2, input, *given, **named)


@formula("avg_pool3d")
def avg_pool3d(input: Tensor, *given: Any, **named: Any) -> Tensor:
    """The mean of each window over the last three dimensions."""
    return _average(3, input, *given, **named)
