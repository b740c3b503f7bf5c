"""How far a call's own rounding can move each number that dumps hold of a result, where all that the call is given is equal.

Two sides then round the same sum to a coarse format (16 bits and less), each once, or a few times where the call is no kernel.
An element x is off by t = r·(u·|x| + τ) + s·x̄ at most: u is the unit of the format and what sums in the accumulation dtype add
(ε + εₐ·√K), τ its smallest number, s = 10·εₐ·√K, as accumulation rounds by the terms of a sum, x̄ the root mean square of the
result (of its terms where they cancel), and r how often the call rounds. Of n elements with norm N and largest |x| = P, with
T = r·(u·N + τ·√n) + s·N:

    largest, smallest    one element each: 2·t
    mean                 n·|Δmean| ≤ min(k·√m, 2·√n)·T
    norm                 |ΔN| ≤ min(k·√m·√((r·u·P)² + (r·τ)² + (s·x̄)²), 2·T) + T²/2N
    elements             each 2·t
    zeros, histograms    see by_counts

Roundings of elements are independent, so that their sum moves by the root of the sum of squares (Hoeffding: more than k = 4
times √Σt², with |tᵢ| as the bound of each, has a chance below 2·exp(−8) even if all roundings were the largest possible; they
are uniform, t/√6 in the root mean square, which makes it ten standard deviations). Elements of a row may share a rounding where
a call is several kernels, as a norm divides by one number: m is the largest dimension there, and 1 for a kernel.
The change of the norm is Σx·Δx/N to first order, of which the above is the root of the sum of squares with Σx⁴ ≤ P²·N².

Of a call that is given other numbers, norm and mean may move further, by κ·(c + d·√(w/n)) of the norm and of the root mean
square: c is by how much a norm or mean of what arrives moved, d how far that is apart, and w the largest dimension of the
result, whose elements may share an error. What has no direction when it arrives has none in the result. κ = 5; at most 1.43
was found in 12,740 results of healthy kernels that are given other numbers (the backward of a ReLU, whose slope jumps).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compare.number_formats import FORMATS
from trainprobe.engine.core.records import Call, Value

COARSE = 2.0**-12  # formats with a larger ε are told apart by the rounding of their elements
SEVERAL = 4.0  # roundings of what is no kernel: a module of several operators, an operator that is made of others
SURELY = 2.0  # times beyond what rounding explains that are no doubt
_SIGMAS = 4.0  # k
_HARD = 2.0  # roundings that one element may be off by
_SLACK = 10.0  # of the model of accumulation
_GROWTH = 5.0  # κ
_MANY = 512  # elements

F64 = npt.NDArray[np.float64]


class OwnRounding(NamedTuple):
    """unit: u. smallest: τ. sums: εₐ·√K. times: r. shared: m. arrives: κ·(c + d·√(w/n))."""

    unit: float
    smallest: float
    sums: float
    times: float = 1.0
    shared: float = 1.0
    arrives: float = 0.0


class Beyond(NamedTuple):
    """times: by how many times a number of a result moved further than rounding explains. what: which. changed: of itself."""

    times: float
    what: str
    changed: float


WITHIN = Beyond(0.0, "", 0.0)


class Counted(NamedTuple):
    """What else a dump may hold of a value: how many elements are zero, and (edges, counts) of a histogram."""

    zeros: float | None
    histogram: tuple[F64, F64] | None


# what rounds once: operators by their last name, modules of torch by their class
_NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "softmax", "log_softmax")
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "conv1d", "conv2d", "conv3d")
_ACTIVATIONS = ("relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "mish", "softplus", "hardswish")
_DIFFERENTIABLE = frozenset([*_NORMS, *_PRODUCTS, *_ACTIVATIONS])  # whose backward is a kernel too
_KERNELS = _DIFFERENTIABLE | frozenset(
    [
        *("add", "sub", "rsub", "radd", "mul", "rmul", "div", "truediv", "neg", "abs", "square", "sqrt", "rsqrt", "exp", "log"),
        *("clamp", "sum", "mean", "embedding", "to", "float", "half", "bfloat16"),
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
    ]
)
# large logits make much of a difference in softmax, small deviations of a channel in its norm, equal terms in a difference
_MAKE_MORE = frozenset(
    [
        *("softmax", "log_softmax", "Softmax", "exp", "log", "cross_entropy", "nll_loss", "sub", "rsub"),
        *("batch_norm", "group_norm", "instance_norm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    ]
)
_MODULES = frozenset(
    [
        *("Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
        *("GELU", "ReLU", "SiLU", "Tanh", "Sigmoid", "Softmax"),
    ]
)


def arriving(moved: float, apart: float, shape: tuple[int, ...]) -> float:
    """Return by how much of itself what a kernel is given may move the norm of a result; 0 where too few elements tell it.

    moved: c. apart: d. shape: of the result.
    """
    n = math.prod(shape)
    many = n >= _MANY and len(shape) > 1 and math.isfinite(apart)  # a sum over all samples may cancel
    return _GROWTH * (moved + apart * math.sqrt(max(shape) / n)) if many else 0.0


ATTENTION = "scaled_dot_product_attention"


def roundings(call: Call, shape: tuple[int, ...], *, joined: bool) -> tuple[float, float]:
    """Return how often a call rounds each element of a result, r, and of how many elements the roundings are one, m.

    Attention rounds its probabilities, by u/2 at most, which all D elements of a head share, and its result: twice, with
    (2·u)² + (u/2)²·D as the sum of squares. joined: whether the result is made of those of several calls.
    """
    if is_kernel(call) and not joined:
        return 1.0, 1.0
    if call.kind == "op" and call.phase == "forward" and call.name.endswith(ATTENTION) and not joined and shape:
        return 2.0, 1 + shape[-1] / 16
    return SEVERAL, max(shape, default=1)


def is_kernel(call: Call) -> bool:
    """Return whether a call rounds each element of its results once."""
    if call.kind == "op":
        return call.name.rpartition(".")[2].strip("_") in (_DIFFERENTIABLE if call.phase == "backward" else _KERNELS)
    return call.kind in ("module", "parameter") and call.cls in _MODULES


def passes_on(call: Call) -> bool:
    """Return whether a kernel makes no more of a small difference than it is: exponentials, logarithms and channels do."""
    last = call.name.rpartition(".")[2].strip("_") if call.kind == "op" else call.cls
    return is_kernel(call) and last not in _MAKE_MORE


def in_its_format(call: Call, result: Value, given: int) -> float:
    """Return over how many roundings a result may be added up in its own format: 1 of most, 0 where it is not known.

    That is the gradient of a weight, but of a product's: PyTorch's layer norm adds it up so on the CPU, thread by thread.
    given: how many elements the gradient of the output has.
    """
    product = call.name.rpartition(".")[2] in _PRODUCTS if call.kind == "op" else call.cls.startswith(("Linear", "Conv"))
    if call.kind == "parameter" and not product:
        return 0.0
    size = math.prod(result.shape)
    return given / size if call.phase == "backward" and not product and 0 < size < given else 1.0


def smallest(dtype: str) -> float:
    """Return the smallest positive number of a format."""
    found = FORMATS.get(dtype)
    return 0.0 if found is None else found.smallest * found.epsilon


def by_statistics(a: Mapping[str, float], b: Mapping[str, float], n: int, how: OwnRounding) -> Beyond:
    """Return how far statistics of a result of n elements moved, over what rounding explains. a, b: those of both sides."""
    norm = max(a["norm"], b["norm"])
    if not (n and 0 < norm < math.inf):
        return WITHIN
    mean_square = norm / math.sqrt(n)
    of_sums = _SLACK * how.sums * mean_square
    whole = how.times * (how.unit * norm + how.smallest * math.sqrt(n)) + of_sums * math.sqrt(n)
    peak = min(norm, max(abs(side[name]) for side in (a, b) for name in ("max", "min")))
    random = _SIGMAS * math.sqrt(how.shared)
    of_peak = math.hypot(how.times * how.unit * peak, how.times * how.smallest, of_sums)
    limits = {
        "norm": min(random * of_peak, _HARD * whole) + whole**2 / (2 * norm) + how.arrives * norm,
        "mean": min(random / math.sqrt(n), _HARD) * whole / math.sqrt(n) + how.arrives * mean_square,
    }
    for name in ("max", "min") if how.arrives == 0 else ():
        size = max(abs(a[name]), abs(b[name]))
        limits[name] = _HARD * (how.times * (how.unit * size + how.smallest) + of_sums)
    scale = {"norm": norm, "mean": mean_square, "max": peak, "min": peak}
    found = [
        Beyond(abs(a[name] - b[name]) / limit, name, abs(a[name] - b[name]) / scale[name]) for name, limit in limits.items()
    ]
    return max(found)


def by_elements(a: F64, b: F64, how: OwnRounding, within: bool) -> Beyond:
    """Return how far the element that moved furthest did, over what rounding explains.

    within: whether something may be rounded within the call, which is as large as all of the result.
    """
    mean_square = max(float(np.linalg.norm(x)) for x in (a, b)) / math.sqrt(max(1, a.size))
    size, moved = np.maximum(np.abs(a), np.abs(b)), np.abs(a - b)
    limit = _HARD * (
        how.times * (how.unit * (size + (mean_square if within else 0.0)) + how.smallest) + _SLACK * how.sums * mean_square
    )
    times = np.divide(moved, limit, out=np.zeros_like(moved), where=limit > 0).reshape(-1)
    at = int(times.argmax()) if times.size else 0
    return (
        Beyond(float(times[at]), "one element", float(moved.reshape(-1)[at] / size.reshape(-1)[at])) if times.any() else WITHIN
    )


def by_counts(a: Counted, b: Counted, norm: float, n: int, how: OwnRounding) -> Beyond:
    """Return how many elements of a kernel's result crossed zero or an edge of a histogram, over what rounding explains.

    An element crosses an edge e if it is within its rounding of e, so that λ = 2·t/w·c of the c elements of a bin beside it, of
    width w, may: λ + k·√λ + 1. It is zero on one side alone if it is smaller than the rounding of its accumulation.
    """
    of_sums = _SLACK * how.sums * norm / math.sqrt(n)
    found = [WITHIN]
    if a.zeros is not None and b.zeros is not None:
        found.append(_crossed(a.zeros - b.zeros, n * _SLACK * how.sums, "count of zeros", n))
    if a.histogram is not None and b.histogram is not None and np.array_equal(a.histogram[0], b.histogram[0]):
        edges, counts = a.histogram
        dense = np.maximum(counts, b.histogram[1]) / np.diff(edges)
        for edge, moved, density in zip(
            edges[1:-1], np.cumsum(counts - b.histogram[1])[:-1], np.maximum(dense[1:], dense[:-1]), strict=True
        ):
            near = _HARD * how.times * (how.unit * abs(edge) + how.smallest) + of_sums
            found.append(_crossed(moved, near * density, "histogram", n))
    return max(found)


def _crossed(moved: float, expected: float, what: str, n: int) -> Beyond:
    return Beyond(abs(moved) / (expected + _SIGMAS * math.sqrt(expected) + 1), what, abs(moved) / n)


def statistics_of(x: F64) -> Mapping[str, float]:
    """Return the statistics of stored elements."""
    return {"norm": float(np.linalg.norm(x)), "max": float(x.max()), "min": float(x.min()), "mean": float(x.mean())}
