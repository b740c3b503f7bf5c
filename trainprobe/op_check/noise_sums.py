"""How large the rounding of a step is that adds up: in units of accumulation, √K·f(|arguments|) for a sum of K products.

A rule takes (function, args, kwargs, result, noise) and returns a tensor of the result's shape, or a number that is times the
result's size; a tuple of these where there are several results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Rounding(Protocol):
    """How a kernel rounds, see noise.Noise."""

    accumulate: float
    stored: float
    matrices: float


Rule = Callable[[Any, Sequence[Any], Mapping[str, Any], Any, Rounding], Any]
_FACTORS = {"alpha", "beta", "value", "weight"}  # plain numbers that terms are multiplied by


def _absolute(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.abs() if tree.dtype in (torch.float64, torch.complex128) else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(_absolute(x) for x in tree)
    return tree


def _of_length(length: Callable[[Sequence[Any], Any], int]) -> Rule:
    def rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
        whole = func(
            *_absolute(list(args)),
            **{k: abs(v) if k in _FACTORS and isinstance(v, (int, float)) else _absolute(v) for k, v in kwargs.items()},
        )
        root = math.sqrt(max(1, length(args, out)))
        if isinstance(whole, Tensor):
            return whole.abs() * root
        return tuple(w.abs() * root if isinstance(w, Tensor) and w.dtype == torch.float64 else None for w in whole)

    return rule


def _vanished(args: Sequence[Any], out: Any) -> int:
    first = out[0] if isinstance(out, (tuple, list)) else out
    return args[0].numel() // max(1, first.numel())


def walk(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """The random walk of a sum's partial sums, √K · (√Σ products² + |sum|) in units of accumulation, and of its inputs."""
    squares = func(*_squared(list(args)), **{k: v * v if k in _FACTORS else v for k, v in kwargs.items()})
    length = math.sqrt(max(1, PRODUCTS[func.overloadpacket.__name__](args, out)))
    inputs = noise.matrices / noise.accumulate if noise.accumulate else 0.0
    pairs = [(squares, out)] if isinstance(out, Tensor) else list(zip(squares, out, strict=False))
    sizes = [s.clamp_min(0).sqrt() * (length + inputs) + o.abs() * length if isinstance(s, Tensor) else None for s, o in pairs]
    return sizes[0] if isinstance(out, Tensor) else tuple(sizes)


def _squared(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.square() if tree.dtype == torch.float64 else tree
    return type(tree)(_squared(x) for x in tree) if isinstance(tree, (list, tuple)) else tree


def _whole(args: Sequence[Any], out: Any) -> int:
    return max(x.numel() for x in args if isinstance(x, Tensor))


def _sum_of_two(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """One rounding of the result, and one of the second argument where a factor multiplies it first."""
    factor = kwargs.get("alpha", 1)
    if factor == 1:
        return 1.0
    return out.abs() + abs(factor) * (args[1].abs() if isinstance(args[1], Tensor) else abs(args[1]))


def coordinates(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """Interpolation calculates places in its own format: of S places each is off by S·u, the result by as much of its data.

    In 16 bits its weights have the format of the data.
    """
    name = func.overloadpacket.__name__
    floats = [x for x in args if isinstance(x, Tensor)]
    places = max(max(x.shape, default=1) for x in floats)
    coarse = noise.stored / noise.accumulate if noise.accumulate else 1.0
    if name.startswith("grid_sampler"):
        places *= coarse  # its places have the format of its inputs
        if name.endswith("backward"):
            gradient, data, at = (_largest(x) for x in floats[:3])
            each = places * max(1.0, at) * gradient
            return tuple(
                None if o is None else torch.full_like(o, 4 * a)
                for o, a in zip(out, (each, each * places * data), strict=False)
            )
    elif "nearest" not in name:
        places = max(places, coarse * (out.ndim - 2) / 4)
    reach = places * max(_largest(x) for x in floats)
    each = [torch.full_like(o, 4 * reach) for o in ([out] if isinstance(out, Tensor) else out)]
    return each[0] if isinstance(out, Tensor) else tuple(each)


def _largest(x: Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0


def _histogram(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """Edges of bins are worked out from both ends of the range, and densities are counts over differences of edges."""
    counts, edges = out
    off = 2 * _largest(edges)
    widths = edges.diff().abs().clamp_min(1e-300)
    density = kwargs.get("density", any(a is True for a in args)) and counts.shape == widths.shape
    return counts * (1 + off / widths) if density else 0.0, torch.full_like(edges, off)


def _log_softmax(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """A difference of numbers that may cancel: x − max, of size |out|, and the logarithm of a sum of 1 to K."""
    return 2 * out.abs() + 1 + math.log(max(args[0].shape, default=1))


def _paths(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """CTC adds logarithms as large as the loss over all T times, and its gradient is exponential in these sums."""
    gradient, logs, losses = args[0], args[1], args[5]
    largest = float(torch.where(losses.isfinite(), losses, 0.0).abs().max()) if losses.numel() else 0.0
    return (out.abs() + gradient.abs().max() * logs.exp()) * (1 + largest) * math.sqrt(max(1, logs.shape[0]))


def _transform(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """A fast Fourier transform of K numbers is off by log₂ K roundings of the root mean square of its results."""
    dims = list(args[1])
    length = math.prod(max(args[0].shape[d], out.shape[d]) for d in dims)
    size = out.abs().square_().mean(dims, True).sqrt_() * (1 + math.log2(max(2, length)))
    return size.expand(out.shape).contiguous()


def _lerp(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    weight = args[2].abs() if isinstance(args[2], Tensor) else abs(args[2])
    return args[0].abs() + 2 * weight * (args[0].abs() + args[1].abs())


def _variance(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Rounding) -> Any:
    """A variance may be taken as E x² − (E x)²; its parts are as large as the mean of the squares."""
    square = func(args[0].abs() + 0.0, *args[1:], **kwargs)
    large = args[0].square().amax() if args[0].numel() else 0.0
    first = square[0] if isinstance(square, tuple) else square
    root = math.sqrt(max(1, _vanished(args, out)))
    if func.overloadpacket.__name__.startswith("std"):
        size = large / first.clamp_min(1e-300) * root
        size = torch.minimum(size, torch.full_like(size, math.sqrt(float(large)) / (noise.accumulate or 2**-24)))
    else:
        size = torch.zeros_like(first) + large * root
    return (size, args[0].abs().amax() * root + 0 * first) if isinstance(square, tuple) else size


# sums of products → how many products
PRODUCTS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    **dict.fromkeys(["mm", "bmm", "mv", "dot", "vdot"], lambda args, out: args[0].shape[-1]),
    **dict.fromkeys(["addmm", "baddbmm", "addmv"], lambda args, out: args[1].shape[-1] + 1),
    "addbmm": lambda args, out: args[1].shape[-1] * args[1].shape[0] + 1,
    "addr": lambda args, out: 2,
    **dict.fromkeys(["sum", "mean", "nansum", "trace"], _vanished),
    "cumsum": lambda args, out: max(args[0].shape, default=1),
    **dict.fromkeys(["convolution", "_convolution", "mkldnn_convolution"], lambda args, out: args[1][0].numel() + 1),
    "convolution_backward": lambda args, out: max(args[2][0].numel(), args[0].numel() // max(1, args[0].shape[1])),
    **dict.fromkeys(["addcmul", "addcmul_", "addcdiv", "addcdiv_"], lambda args, out: 2),
    **dict.fromkeys(["index_add", "index_add_", "scatter_add", "scatter_add_", "_index_put_impl_", "index_put_"], _whole),
    **dict.fromkeys(["index_put", "_unsafe_index_put"], _whole),
    **dict.fromkeys(["avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"], _whole),
    **dict.fromkeys(["embedding_dense_backward"], _whole),
}
SUMS: dict[str, Rule] = {
    **{name: _of_length(length) for name, length in PRODUCTS.items()},
    **dict.fromkeys(["norm", "linalg_vector_norm"], _of_length(_vanished)),
    "_cdist_forward": _of_length(lambda args, out: max(args[0].shape, default=1)),
    **dict.fromkeys(["prod", "cumprod", "cumprod_"], _of_length(lambda args, out: max(1, args[0].numel()) ** 2)),
    **dict.fromkeys(["add", "sub", "rsub", "add_", "sub_"], _sum_of_two),
    **dict.fromkeys(["lerp", "lerp_"], _lerp),
    "_log_softmax": _log_softmax,
    "_ctc_loss_backward": _paths,
    "histogram": _histogram,
    **dict.fromkeys(["_fft_c2c", "_fft_r2c", "_fft_c2r"], _transform),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], _variance),
}
