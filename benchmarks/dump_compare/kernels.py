"""Kernels that compute otherwise: below autograd, so that neither a program nor its probe sees more than other numbers.

A `Replaced` stands in the place of torch's CPU kernels of some aten operators while a training runs. Healthy ones sum in
another order or in float64 and round once; wrong ones change what the kernel gives, in float32, and round that to its format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Sequence[Any]
Change = Callable[[Tensor, Arguments], Tensor]  # the result in float32 and what the kernel was given → the result
Instead = Callable[[Callable[..., Any], Arguments, dict[str, Any]], Any]  # the kernel and what it is given → its result


@dataclass(frozen=True)
class Fault:
    """op: name of the aten operator. at: which of its calls in a run, from 0. part: which of its results."""

    op: str
    change: Change
    at: int = 0
    part: int = 0


class Replaced(TorchDispatchMode):
    """Healthy kernels in place of torch's, by operator, and at most one wrong one. seen: its right and its wrong result."""

    def __init__(self, instead: dict[str, Instead] | None = None, fault: Fault | None = None) -> None:
        super().__init__()
        self._instead, self._fault = instead or {}, fault
        self._calls: Counter[str] = Counter()
        self.seen: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> Replaced:
        """Begin to count calls anew."""
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, more = func._schema.name.removeprefix("aten::"), kwargs or {}
        out = self._instead[name](func, args, more) if name in self._instead else func(*args, **more)
        number, fault = self._calls[name], self._fault
        self._calls[name] += 1
        if fault is None or (fault.op, fault.at) != (name, number):
            return out
        parts = list(out) if isinstance(out, tuple) else [out]
        right = parts[fault.part]
        wrong = fault.change(right.float(), args).to(right.dtype)
        self.seen = right.clone(), wrong.clone()
        parts[fault.part] = wrong
        return tuple(parts) if isinstance(out, tuple) else wrong


def _in_float64(func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute with float64 and round once."""
    dtype = next(x.dtype for x in args if isinstance(x, Tensor))
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    out = func(*wide, **kwargs)
    narrow = [
        x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float64 else x for x in (out if type(out) is tuple else [out])
    ]
    return tuple(narrow) if type(out) is tuple else narrow[0]


def _permuted(func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Sum the products of a matrix product in another order."""
    *before, a, b = args
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(a.shape[1]))
    return func(*before, a[:, order], b[order], **kwargs)


def _by_rows(func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute a matrix product for five rows at a time, as another batch or another tiling does."""
    *before, a, b = args
    return torch.cat([func(*before, rows, b, **kwargs) for rows in a.split(5)])


def _in_halves(func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Sum the halves of a matrix product apart, in float32."""
    *before, a, b = args
    half = a.shape[1] // 2
    out = a[:, :half].float() @ b[:half].float() + a[:, half:].float() @ b[half:].float()
    return (out + before[0].float() if before else out).to(a.dtype)


_PRODUCTS = ("mm", "addmm")
_ALL = (*_PRODUCTS, "gelu", "native_layer_norm", "convolution", "_log_softmax", "_softmax", "gelu_backward", "silu")
HEALTHY: dict[str, dict[str, Instead]] = {
    "float64": dict.fromkeys(_ALL, _in_float64),
    "other order": dict.fromkeys(_PRODUCTS, _permuted),
    "rows": dict.fromkeys(_PRODUCTS, _by_rows),
    "halves": dict.fromkeys(_PRODUCTS, _in_halves),
}


def times(factor: float) -> Change:
    """Make all of a result larger."""
    return lambda out, args: out * factor


def part(index: tuple[Any, ...], factor: float) -> Change:
    """Make what stands at an index larger, or zero."""

    def change(out: Tensor, args: Arguments) -> Tensor:
        out = out.clone()
        out[index] *= factor
        return out

    return change


def tanh_gelu(out: Tensor, args: Arguments) -> Tensor:
    """Take GELU's other formula."""
    return functional.gelu(args[0].float(), approximate="tanh")


def sigmoid_gelu(out: Tensor, args: Arguments) -> Tensor:
    """Take the formula x·σ(1.702·x)."""
    return args[0].float() * torch.sigmoid(1.702 * args[0].float())


def in_16_bits(out: Tensor, args: Arguments) -> Tensor:
    """Sum the products of a matrix product in the format of its operands, one after the other."""
    *before, a, b = args
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return (total + before[0] if before else total).float()


def without_bias(out: Tensor, args: Arguments) -> Tensor:
    """Leave out the bias of a linear layer."""
    return out - args[0].float()


def truncated(out: Tensor, args: Arguments) -> Tensor:
    """Round towards zero."""
    *before, a, b = args
    exact = a.double() @ b.double() + (before[0].double() if before else 0.0)
    near = exact.to(a.dtype)
    return torch.where(near.double().abs() > exact.abs(), torch.nextafter(near, torch.zeros_like(near)), near).float()


def norm_with(eps: float, biased: bool = True) -> Change:
    """Normalise with another ε, or with the variance of n − 1."""

    def change(out: Tensor, args: Arguments) -> Tensor:
        x, shape, weight, bias = args[0].float(), args[1], args[2].float(), args[3].float()
        dims = tuple(range(-len(shape), 0))
        spread = x.var(dims, correction=0 if biased else 1, keepdim=True)
        return (x - x.mean(dims, keepdim=True)) * torch.rsqrt(spread + eps) * weight + bias

    return change
