"""Convolutions, their gradients, and those of interpolation, done with pairs of float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainprobe.op_check.double_double import arithmetic
from trainprobe.op_check.double_double.arithmetic import Pair, Tensor, exactly
from trainprobe.op_check.double_double.products import product
from trainprobe.op_check.double_double.rules import Numbers, pair_of, rule

Steps = Sequence[int]


def _both(pair: Pair, move: Callable[[Tensor], Tensor]) -> Pair:
    return move(pair[0]), move(pair[1])


class _Windows:
    """What a convolution of x, a stack of images, sees at each place of its window."""

    def __init__(self, shape: Steps, window: Steps, stride: Steps, padding: Steps, dilation: Steps, groups: int) -> None:
        self.shape, self.window, self.groups = [*shape], [*window], groups
        n = len(self.window)
        self._stride, self._padding, self._dilation = ([*x] * (n if len(x) == 1 else 1) for x in (stride, padding, dilation))
        self.padded = [*shape[:2], *(size + 2 * p for size, p in zip(shape[2:], self._padding, strict=True))]
        reach = [d * (k - 1) + 1 for d, k in zip(self._dilation, self.window, strict=True)]
        self.out = [(a - r) // s + 1 for a, r, s in zip(self.padded[2:], reach, self._stride, strict=True)]

    def _inside(self) -> tuple[slice, ...]:
        middle = (slice(p, p + size) for p, size in zip(self._padding, self.shape[2:], strict=True))
        return (slice(None), slice(None), *middle)

    def _places(self) -> Iterator[tuple[slice, ...]]:
        for offset in itertools.product(*map(range, self.window)):
            begins = [o * d for o, d in zip(offset, self._dilation, strict=True)]
            along = (slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(begins, self.out, self._stride, strict=True))
            yield (slice(None), slice(None), *along)

    def columns(self, x: Tensor) -> Tensor:
        """Return [groups, channels of a group · window, images · places of the result]."""
        whole = x.new_zeros(self.padded)
        whole[self._inside()] = x
        seen = torch.stack([whole[place] for place in self._places()], 2)
        seen = seen.reshape(self.shape[0], self.groups, self.shape[1] // self.groups * math.prod(self.window), -1)
        return seen.permute(1, 2, 0, 3).flatten(2)

    def put_back(self, columns: Pair) -> Pair:
        """Return x with each number of the columns added where it was seen."""
        total = exactly(torch.zeros(self.padded, dtype=torch.float64))
        images, channels = self.shape[:2]

        def apart(x: Tensor) -> Tensor:
            x = x.reshape(self.groups, channels // self.groups, math.prod(self.window), images, *self.out)
            return x.movedim(3, 0).flatten(1, 2)

        high, low = _both(columns, apart)
        for i, place in enumerate(self._places()):
            found = arithmetic.add((total[0][place], total[1][place]), (high[:, :, i], low[:, :, i]))
            total[0][place], total[1][place] = found
        return _both(total, lambda x: x[self._inside()])

    def rows(self, y: Tensor) -> Tensor:
        """Return a result as [groups, channels of a group, images · places]."""
        return y.reshape(y.shape[0], self.groups, y.shape[1] // self.groups, -1).permute(1, 2, 0, 3).flatten(2)

    def result(self, rows: Tensor) -> Tensor:
        """Return what `rows` was made of."""
        images = self.shape[0]
        apart = rows.reshape(self.groups, rows.shape[1], images, *self.out)
        return apart.movedim(2, 0).flatten(1, 2)

    def kernels(self, weight: Tensor) -> Tensor:
        """Return [groups, channels of a group, what a kernel holds]."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)


def _seen_by(x: Pair, w: Pair, windows: _Windows) -> Pair:
    """The convolution of x."""
    return _both(product(_both(w, windows.kernels), _both(x, windows.columns)), windows.result)


def _seen_from(y: Pair, w: Pair, windows: _Windows) -> Pair:
    """The gradient of x, where y is that of the result; and the transposed convolution of y."""
    return windows.put_back(product(_both(w, lambda t: windows.kernels(t).mT), _both(y, windows.rows)))


def _of_weights(y: Pair, x: Pair, windows: _Windows, shape: Steps) -> Pair:
    """The gradient of the weights."""
    found = product(_both(y, windows.rows), _both(x, lambda t: windows.columns(t).mT))
    return _both(found, lambda t: t.reshape(shape))


def _each(x: Sequence[int], n: int) -> list[int]:
    return [*x] * (n if len(x) == 1 else 1)


def _transposed_windows(
    x: Pair, w: Pair, stride: Steps, padding: Steps, dilation: Steps, output_padding: Steps, groups: int
) -> _Windows:
    """The windows of the convolution that leads back from a transposed one's result to x."""
    window, n = w[0].shape[2:], w[0].ndim - 2
    each = zip(x[0].shape[2:], window, *(_each(v, n) for v in (stride, padding, dilation, output_padding)), strict=True)
    size = [(a - 1) * s - 2 * p + d * (k - 1) + more + 1 for a, k, s, p, d, more in each]
    shape = [x[0].shape[0], w[0].shape[1] * groups, *size]
    windows = _Windows(shape, window, stride, padding, dilation, groups)
    windows.out = [*x[0].shape[2:]]  # a padding of the result beyond a stride is seen by nothing
    return windows


@rule("convolution", "_convolution", "convolution_overrideable")
def _convolution(
    func: Any,
    x: Any,
    w: Any,
    bias: Any,
    stride: Steps,
    padding: Steps,
    dilation: Steps,
    transposed: bool,
    output_padding: Steps,
    groups: int,
    *settings: Any,
) -> Numbers:
    x, w = pair_of(x), pair_of(w)
    if transposed:
        found = _seen_from(x, w, _transposed_windows(x, w, stride, padding, dilation, output_padding, groups))
    else:
        found = _seen_by(x, w, _Windows(x[0].shape, w[0].shape[2:], stride, padding, dilation, groups))
    if bias is not None:
        found = arithmetic.add(found, _both(pair_of(bias), lambda t: t.reshape(1, -1, *[1] * (w[0].ndim - 2))))
    return Numbers(found)


@rule("convolution_backward")
def _gradients(
    func: Any,
    y: Any,
    x: Any,
    w: Any,
    bias_sizes: Any,
    stride: Steps,
    padding: Steps,
    dilation: Steps,
    transposed: bool,
    output_padding: Steps,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Numbers | None, ...]:
    y, x, w = pair_of(y), pair_of(x), pair_of(w)
    if transposed:
        windows = _transposed_windows(x, w, stride, padding, dilation, output_padding, groups)
        of_x = _seen_by(y, w, windows) if wanted[0] else None
        of_w = _of_weights(x, y, windows, w[0].shape) if wanted[1] else None
    else:
        windows = _Windows(x[0].shape, w[0].shape[2:], stride, padding, dilation, groups)
        of_x = _seen_from(y, w, windows) if wanted[0] else None
        of_w = _of_weights(y, x, windows, w[0].shape) if wanted[1] else None
    dims = [d for d in range(y[0].ndim) if d != 1]
    of_bias = _both(arithmetic.added_up(y, dims), lambda t: t.reshape(-1)) if wanted[2] else None
    return tuple(None if found is None else Numbers(found) for found in (of_x, of_w, of_bias))
