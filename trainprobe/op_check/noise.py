"""How far a correct kernel may be from the exact result: the rounding of its own steps, measured.

An operator is evaluated in float64 several times. In all but the first, each step is moved by its rounding, with a random
sign: a step that rounds once by u·|result|, a sum of K products by u·√K·Σ|products| (Higham and Mary 2019: what a sum in any
order reaches with high probability), and what a kernel would store in the output's format between two steps by that format's
u. The spread of the results is the noise of the operator at these inputs; whatever its conditioning is, it is in there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.op_check.cases import NotChecked
from trainprobe.op_check.noise_sums import PRODUCTS, SUMS, coordinates, walk

Tensor = torch.Tensor
UNIT = {
    **{torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8},
    **{torch.complex128: 2.0**-53, torch.complex64: 2.0**-24},
}
COARSE = 2.0**-12  # formats that round more than this flip one way or the other where a kernel's noise says so

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
    select_backward slice_backward _local_scalar_dense resize_ set_ unsqueeze_ squeeze_ t_ transpose_ is_same_size
    diagonal_backward im2col rot90 tile movedim pixel_shuffle pixel_unshuffle channel_shuffle embedding max_pool2d_with_indices
    """.split()  # noqa: SIM905  (words read better than a column of quotes)
)
_PUTS = ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
# libraries promise a unit in the last place for these, and polynomials of vector code a little more: in units of u
_SPECIAL = (
    "i0 special_i0e special_i1 special_i1e special_erfcx special_ndtri special_log_ndtr special_bessel_j0 special_bessel_j1"
)
_FUNCTIONS = (
    dict.fromkeys(
        """
    exp exp2 expm1 log log2 log10 log1p tanh sigmoid erfc erfinv sin cos tan asin acos atan atan2 sinh cosh asinh acosh
    atanh pow
    rsqrt lgamma digamma gelu silu softplus mish log_sigmoid_forward elu celu selu _softmax _log_softmax logsumexp logaddexp
    """.split(),  # noqa: SIM905
        2,
    )
    | dict.fromkeys(_SPECIAL.split(), 4)
    | {"erf": 8}
)  # the polynomial of vector code is less exact than the library

_SPAN = 1 << 16  # elements that are moved at a time: they stay in the caches

_CURRENT: ContextVar[Noise | None] = ContextVar("noise", default=None)


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    with without_dispatch():  # what is made once must not be moved by the noise that first asks for it
        drawn = torch.randint(0, 2, (2 * _SPAN,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        return drawn.to(torch.float64).mul_(2).sub_(1)


@lru_cache(maxsize=16)
def _factors(relative: float) -> Tensor:
    with without_dispatch():
        return _signs() * relative + 1


class Draws:
    """Moves float64 tensors up and down at random, in the same way for the same turn.

    The random signs are drawn once and used from random places on: drawing them for each step would cost more than the steps.
    """

    def __init__(self, turn: int) -> None:
        self._random = random.Random(turn)

    def scaled(self, x: Tensor, relative: float) -> Tensor:
        """Return x·(1 ± relative), each element by itself."""
        factors = _factors(relative)
        flat, moved = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
        for begin, place in self._places(x.numel()):
            part = flat[begin : begin + _SPAN]
            torch.mul(part, factors[place : place + len(part)], out=moved[begin : begin + _SPAN])
        return moved.view(x.shape)

    def shifted(self, x: Tensor, amount: Tensor) -> Tensor:
        """Return x ± amount, each element by itself; it stays where the amount is no number. amount: is overwritten."""
        flat, moved = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
        amounts = amount.nan_to_num_(0.0, 0.0, 0.0).expand(x.shape).reshape(-1)
        for begin, place in self._places(x.numel()):
            part = flat[begin : begin + _SPAN]
            signs = _signs()[place : place + len(part)]
            torch.addcmul(part, amounts[begin : begin + _SPAN], signs, out=moved[begin : begin + _SPAN])
        return moved.view(x.shape)

    def factors(self, like: Tensor, relative: float) -> Tensor:
        """Return 1 ± relative, of the shape of `like`."""
        factors = _factors(relative)
        parts = [factors[at : at + min(_SPAN, like.numel() - begin)] for begin, at in self._places(like.numel())]
        return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)).view(like.shape)

    def _places(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield where each span begins, and from where on it takes its signs."""
        for begin in range(0, count, _SPAN):
            yield begin, self._random.randrange(_SPAN)


class Noise(TorchDispatchMode):
    """Moves the result of every step in which a kernel rounds.

    accumulate: u of what the kernel calculates in. stored: u of the format in which it hands values from one of its
    steps to the next.
    backward: gradients are wanted, so that results which a backward reads again are stored too. kernel: the steps are torch's
    kernels, each of which stores its result, and not the primitives of a formula. turn: see Draws. still: move nothing, count
    the steps alone.
    """

    def __init__(
        self,
        turn: int,
        accumulate: float,
        stored: float,
        *,
        backward: bool = False,
        kernel: bool = False,
        still: bool = False,
    ) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.stored = stored
        self.backward = backward
        self.kernel = kernel
        self.still = still
        self.matrices = 0.0
        self.walk = False
        self.largest = math.inf  # of the format in which kernels store their results
        self.least = 0.0  # its least normal number, below which results are rounded like it
        self.rounded = 0  # steps that round
        self.draws = Draws(turn)
        self._token: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch not wrap `__torch_dispatch__` against its compiler, which costs as much as a step: none is compiled."""
        return False

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
        writes = name.endswith("_") and name in SUMS and not self.still
        before = [a.clone() if isinstance(a, Tensor) else a for a in args] if writes else args
        out = func(*args, **kwargs)
        if name in _EXACT or func.is_view or (name in _PUTS and not (args[3:4] or [kwargs.get("accumulate")])[0]):
            return out
        if func._schema.is_mutable and not isinstance(out, Tensor) and not out:
            raise NotChecked(f"{name} writes into its arguments and returns nothing, so that its rounding cannot be followed")
        if self.still:
            _mapped(out, None, lambda o, _: self._moved(o, None, 0.0))
            return out
        rule = coordinates if name.lstrip("_").startswith(("upsample", "grid_sampler", "interpolate")) else SUMS.get(name)
        if rule is not None:
            sizes = (walk if self.walk and name in PRODUCTS else rule)(func, before, kwargs, out, self)
            moved = _mapped(out, sizes, lambda o, size: self._moved(o, size, self.stored if self.kernel else 0.0))
        else:
            unit = self.accumulate * _FUNCTIONS.get(name, 1)
            unit = max(self.stored, unit) if self.kernel else unit
            moved = _mapped(out, None, lambda o, _: self._moved(o, None, unit))
        return out.copy_(moved) if name.endswith("_") and isinstance(out, Tensor) else moved

    def _moved(self, out: Tensor, size: Tensor | float | None, relative: float) -> Tensor:
        """Return `out` moved by `size`, in units of accumulation, and by `relative` of itself.

        size: a number means so many times |out|.
        """
        if out.dtype not in (torch.float64, torch.complex128) or out._is_zerotensor():
            return out
        self.rounded += 1
        if self.still:
            return out
        if out.is_complex():  # both parts are moved by what belongs to the whole
            parts = torch.view_as_real(out.resolve_conj().resolve_neg())
            amount = out.abs().mul_(relative + (size * self.accumulate if isinstance(size, float) else 0.0))
            amount = amount.add_(size, alpha=self.accumulate) if isinstance(size, Tensor) else amount
            return torch.view_as_complex(self.draws.shifted(parts, amount.unsqueeze(-1).expand_as(parts).contiguous()))
        if isinstance(size, Tensor):
            amount = size * self.accumulate
            amount = amount.add_(out.abs(), alpha=relative) if relative else amount
            moved = self.draws.shifted(out, amount)
        elif self.kernel and self.least:
            share = relative + (0.0 if size is None else size * self.accumulate)
            moved = self.draws.shifted(out, torch.where(out == 0, 0.0, out.abs().clamp_min_(self.least).mul_(share)))
        else:
            moved = self.draws.scaled(out, relative + (0.0 if size is None else size * self.accumulate))
        if self.accumulate == UNIT[torch.float64]:
            moved = torch.where(moved.isfinite(), moved, out)
        if self.kernel and math.isfinite(self.largest):
            return torch.where(moved.abs() > self.largest, moved * math.inf, moved)
        return moved


def gradients_alone() -> bool:
    """Return whether a formula is evaluated for its gradients, so that what it returns is not read."""
    noise = _CURRENT.get()
    return noise is not None and noise.backward


def stored(x: Tensor) -> Tensor:
    """Mark what a kernel may keep in the output's format between two of its steps."""
    noise = _CURRENT.get()
    if noise is None:
        return x
    with _disable_current_modes():
        noise.rounded += 1
        return x if noise.still else x * noise.draws.factors(x, noise.stored)


def rough(x: Tensor, units: float) -> Tensor:
    """Mark a step that some kernels take less exactly than a library's function: by so many u of what they calculate in."""
    noise = _CURRENT.get()
    if noise is None or noise.still:
        return x
    with _disable_current_modes():
        return x * noise.draws.factors(x, units * noise.accumulate)


def kept(x: Tensor) -> Tensor:
    """Mark what a backward reads again as the forward stored it, such as the statistics of a norm: in the output's format."""
    noise = _CURRENT.get()
    return stored(x) if noise is not None and noise.backward else x


def from_result(x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return value(x) whose gradient is slope(y, gradient of y): kernels work it out of their stored result y."""
    return _FromResult.apply(x, value, slope)


def from_input(x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
    """Return value(x) whose gradient is slope(x) times that of the result. slope: takes what value takes."""
    return _FromInput.apply(x, value, slope)


class _FromInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x if gradients_alone() else value(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * ctx.slope(x), None, None


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
