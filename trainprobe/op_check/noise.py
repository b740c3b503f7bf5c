"""How far a correct kernel may be from the exact result: the rounding of its own steps, measured.

An operator is evaluated in float64 several times. In all but the first, each step is moved by its rounding, with a random
sign: a step that rounds once by u·|result|, a sum of K products by u·√K·Σ|products| (Higham and Mary 2019: what a sum in any
order reaches with high probability), and what a kernel would store in the output's format between two steps by that format's
u. The spread of the results is the noise of the operator at these inputs; whatever its conditioning is, it is in there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainprobe.op_check.cases import NotChecked

Tensor = torch.Tensor
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
aten = torch.ops.aten

# steps that make no rounding: they move, choose or compare
_EXACT = frozenset(
    """
    clone copy_ detach alias view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze select slice
    as_strided narrow split split_with_sizes chunk unbind cat stack index index_select gather masked_select masked_fill
    masked_fill_ where abs neg sign relu relu_ threshold threshold_backward maximum minimum max min amax amin argmax argmin sort
    topk eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isnan isinf
    isfinite
    zeros zeros_like ones ones_like full full_like empty empty_like empty_strided new_zeros new_ones new_empty new_full
    new_empty_strided fill_ zero_ arange scalar_tensor lift_fresh _to_copy to floor ceil round trunc clamp clamp_min
    clamp_max tril
    triu flip roll repeat diagonal diag_embed unfold constant_pad_nd one_hot nonzero lift scatter slice_scatter select_scatter
    select_backward slice_backward index_put _local_scalar_dense resize_ set_ unsqueeze_ squeeze_ t_ transpose_ is_same_size
    diagonal_backward im2col rot90 tile movedim pixel_shuffle pixel_unshuffle channel_shuffle embedding max_pool2d_with_indices
    """.split()  # noqa: SIM905  (words read better than a column of quotes)
)
# libraries promise a unit in the last place for these, and polynomials of vector code a little more: in units of u
_FUNCTIONS = dict.fromkeys(
    """
    exp exp2 expm1 log log2 log10 log1p tanh sigmoid erfc erfinv sin cos tan asin acos atan atan2 sinh cosh asinh acosh
    atanh pow
    rsqrt lgamma digamma gelu silu softplus mish log_sigmoid_forward elu celu selu _softmax _log_softmax logsumexp logaddexp
    """.split(),  # noqa: SIM905
    2,
) | {"erf": 4}

_CURRENT: ContextVar[Noise | None] = ContextVar("noise", default=None)


class Noise(TorchDispatchMode):
    """Moves the result of every step in which a kernel rounds.

    accumulate: u of what the kernel calculates in. stored: u of the format in which it hands values from one of its
    steps to the next.
    backward: gradients are wanted, so that results which a backward reads again are stored too. kernel: the steps are torch's
    kernels, each of which stores its result, and not the primitives of a formula.
    """

    def __init__(self, seed: int, accumulate: float, stored: float, *, backward: bool = False, kernel: bool = False) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.stored = stored
        self.backward = backward
        self.kernel = kernel
        self.matrices = 0.0
        self.walk = False
        self.largest = math.inf  # of the format in which kernels store their results
        self.rounded = 0  # steps that were moved
        self._generator = torch.Generator().manual_seed(seed)
        self._token: Any = None

    def __enter__(self) -> Noise:
        self._token = _CURRENT.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _CURRENT.reset(self._token)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one step and move what it gives."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        before = [a.clone() if isinstance(a, Tensor) else a for a in args] if name in _SUMS and name.endswith("_") else args
        out = func(*args, **kwargs)
        if name in _EXACT or func.is_view:
            return out
        if func._schema.is_mutable and not isinstance(out, Tensor) and not out:
            raise NotChecked(f"{name} writes into its arguments and returns nothing, so that its rounding cannot be followed")
        rule = _coordinates if name.lstrip("_").startswith(("upsample", "grid_sampler", "interpolate")) else _SUMS.get(name)
        if rule is not None:
            sizes = (
                _walk(func, before, kwargs, out, self) if self.walk and name in _PRODUCTS else rule(func, before, kwargs, out)
            )
            moved = _mapped(out, sizes, lambda o, size: self._moved(o, size, self.stored if self.kernel else 0.0))
        else:
            unit = self.accumulate * _FUNCTIONS.get(name, 1)
            moved = _mapped(out, None, lambda o, _: self._moved(o, None, self.stored if self.kernel else unit, unit))
        return out.copy_(moved) if name.endswith("_") and isinstance(out, Tensor) else moved

    def _moved(self, out: Tensor, size: Tensor | None, relative: float, unit: float = 0.0) -> Tensor:
        """Return `out` moved by `size` (an amount in units of accumulation) and by a relative rounding of its own."""
        if out.dtype != torch.float64 or out._is_zerotensor():
            return out
        self.rounded += 1
        amount = out.abs() * max(relative, unit)
        if size is not None:
            amount = amount + size * self.accumulate
        moved = out + amount * self.signs(out)
        finite = torch.where(moved.isfinite(), moved, out)
        return torch.where(finite.abs() > self.largest, finite * math.inf, finite) if self.kernel else finite

    def signs(self, like: Tensor) -> Tensor:
        """Return −1 and 1 at random, of the shape of `like`."""
        drawn = torch.randint(0, 2, like.shape, generator=self._generator, dtype=torch.int8)
        return drawn.to(torch.float64).mul_(2).sub_(1)


def stored(x: Tensor) -> Tensor:
    """Mark what a kernel may keep in the output's format between two of its steps."""
    noise = _CURRENT.get()
    if noise is None:
        return x
    with _disable_current_modes():
        noise.rounded += 1
        return x * (1 + noise.stored * noise.signs(x))


def kept(x: Tensor) -> Tensor:
    """Mark what a backward reads again as the forward stored it, such as the statistics of a norm: in the output's format."""
    noise = _CURRENT.get()
    return stored(x) if noise is not None and noise.backward else x


def from_result(x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return value(x) whose gradient is slope(y, gradient of y): kernels work it out of their stored result y."""
    return _FromResult.apply(x, value, slope)


class _FromResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = value(x)
        ctx.save_for_backward(kept(y))
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return ctx.slope(y, gradient), None, None


def _mapped(out: Any, sizes: Any, move: Callable[[Tensor, Any], Tensor]) -> Any:
    if isinstance(out, Tensor):
        return move(out, sizes[0] if isinstance(sizes, tuple) else sizes)
    if isinstance(out, (tuple, list)):
        each = sizes if isinstance(sizes, tuple) else (sizes,) * len(out)
        moved = [move(o, s) if isinstance(o, Tensor) else o for o, s in zip(out, each, strict=False)]
        return type(out)(moved) if type(out) in (tuple, list) else tuple(moved)
    return out


# --- sums of products: √K·f(|arguments|) -------------------------------------------------------------------------------------
_FACTORS = {"alpha", "beta", "value", "weight"}  # plain numbers that terms are multiplied by


def _absolute(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.abs() if tree.dtype == torch.float64 else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(_absolute(x) for x in tree)
    return tree


def _of_length(length: Callable[[Sequence[Any], Any], int]) -> Callable[..., Any]:
    def rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
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


def _walk(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, noise: Noise) -> Any:
    """The random walk of a sum's partial sums, √K · (√Σ products² + |sum|) in units of accumulation, and of its inputs."""
    squares = func(*_squared(list(args)), **{k: v * v if k in _FACTORS else v for k, v in kwargs.items()})
    length = math.sqrt(max(1, _PRODUCTS[func.overloadpacket.__name__](args, out)))
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


def _sum_of_two(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """One rounding of the result, and one of the second argument where a factor multiplies it first."""
    factor = kwargs.get("alpha", 1)
    size = out.abs()
    return size if factor == 1 else size + abs(factor) * (args[1].abs() if isinstance(args[1], Tensor) else abs(args[1]))


def _coordinates(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Interpolation calculates places in its own format: of S places each is off by S·u, the result by as much of its data."""
    floats = [x for x in args if isinstance(x, Tensor)]
    reach = max(max(x.shape, default=1) for x in floats) * max(float(x.abs().amax()) if x.numel() else 0.0 for x in floats)
    noise = _CURRENT.get()
    if noise is not None and noise.accumulate and func.overloadpacket.__name__.startswith("grid_sampler"):
        reach *= noise.stored / noise.accumulate  # its places have the format of its inputs
    each = [torch.full_like(o, 4 * reach) for o in ([out] if isinstance(out, Tensor) else out)]
    return each[0] if isinstance(out, Tensor) else tuple(each)


def _log_softmax(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """A difference of numbers that may cancel: x − max, of size |out|, and the logarithm of a sum of 1 to K."""
    return 2 * out.abs() + 1 + math.log(max(args[0].shape, default=1))


def _paths(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """CTC adds logarithms as large as the loss over all T times, and its gradient is exponential in these sums."""
    gradient, logs, losses = args[0], args[1], args[5]
    largest = float(torch.where(losses.isfinite(), losses, 0.0).abs().max()) if losses.numel() else 0.0
    return (out.abs() + gradient.abs().max() * logs.exp()) * (1 + largest) * math.sqrt(max(1, logs.shape[0]))


def _lerp(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    weight = args[2].abs() if isinstance(args[2], Tensor) else abs(args[2])
    return args[0].abs() + 2 * weight * (args[0].abs() + args[1].abs())


def _variance(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """A variance may be taken as E x² − (E x)²; its parts are as large as the mean of the squares."""
    square = func(args[0].abs() + 0.0, *args[1:], **kwargs)
    large = args[0].square().amax() if args[0].numel() else 0.0
    first = square[0] if isinstance(square, tuple) else square
    root = math.sqrt(max(1, _vanished(args, out)))
    if func.overloadpacket.__name__.startswith("std"):
        size = large / first.clamp_min(1e-300) * root
        size = torch.minimum(size, torch.full_like(size, math.sqrt(float(large)) / 2**-24))
    else:
        size = torch.zeros_like(first) + large * root
    return (size, args[0].abs().amax() * root + 0 * first) if isinstance(square, tuple) else size


# sums of products → how many products
_PRODUCTS: dict[str, Callable[[Sequence[Any], Any], int]] = {
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
    **dict.fromkeys(["avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"], _whole),
    **dict.fromkeys(["embedding_dense_backward"], _whole),
}
_SUMS: dict[str, Callable[..., Any]] = {
    **{name: _of_length(length) for name, length in _PRODUCTS.items()},
    **dict.fromkeys(["norm", "linalg_vector_norm"], _of_length(_vanished)),
    "_cdist_forward": _of_length(lambda args, out: max(args[0].shape, default=1)),
    **dict.fromkeys(["prod", "cumprod", "cumprod_"], _of_length(lambda args, out: max(1, args[0].numel()) ** 2)),
    **dict.fromkeys(["add", "sub", "rsub", "add_", "sub_"], _sum_of_two),
    **dict.fromkeys(["lerp", "lerp_"], _lerp),
    "_log_softmax": _log_softmax,
    "_ctc_loss_backward": _paths,
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], _variance),
}
