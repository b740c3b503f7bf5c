"""Torch's steps, done with pairs of float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainprobe.op_check.double_double import arithmetic, functions
from trainprobe.op_check.double_double.arithmetic import Pair, Tensor, chosen, exactly
from trainprobe.op_check.double_double.products import product


class Numbers(tuple[Tensor, Tensor]):
    """A pair, told apart from other tuples among arguments."""

    __slots__ = ()


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
# steps that move numbers → the first argument that fills in a number, None where none does
MOVES: dict[str, int | None] = {
    **dict.fromkeys(
        """
    clone detach alias view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze select slice
    as_strided narrow split split_with_sizes chunk unbind cat stack index index_select gather where tril triu flip roll repeat
    diagonal diag_embed unfold select_backward slice_backward diagonal_backward slice_scatter select_scatter lift
    lift_fresh rot90 movedim pixel_shuffle pixel_unshuffle channel_shuffle embedding _embedding masked_select
    broadcast_to masked_scatter squeeze_ unsqueeze_ t_ transpose_ as_strided_scatter diagonal_scatter _chunk_cat
    """.split()  # noqa: SIM905
    ),
    "constant_pad_nd": 2,
    "scatter": 3,
}
NOT_BY_PARTS = {"native_dropout", "bernoulli", "uniform", "normal", "rand_like", "randn_like"}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule: it takes the step and its arguments, with pairs in the place of tensors, and returns Numbers."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def pair_of(x: Any) -> Pair:
    """Return an argument as a pair."""
    if isinstance(x, Numbers):
        return x
    return exactly(x.to(torch.float64)) if isinstance(x, Tensor) else arithmetic.constant(float(x))


def _in_order(pair: Pair) -> Numbers:
    return Numbers(torch.broadcast_tensors(*pair))


def _functions() -> None:
    for name, of_one in {
        **{"neg": arithmetic.negative, "abs": arithmetic.absolute, "sqrt": arithmetic.root, "exp": functions.exponential},
        **{"expm1": functions.exponential_less_one, "log": functions.logarithm, "log1p": functions.logarithm_of_one_and},
        **{"exp2": functions.power_of_two, "log2": functions.binary_logarithm, "log10": functions.decimal_logarithm},
        **{"tanh": functions.hyperbolic_tangent, "sigmoid": functions.sigmoid, "sinh": functions.hyperbolic_sine},
        **{"cosh": functions.hyperbolic_cosine, "erf": functions.error_function, "sin": functions.sine},
        **{"erfc": functions.complementary_error_function, "cos": functions.cosine, "rsqrt": functions.reciprocal_root},
        **{"reciprocal": functions.reciprocal, "square": lambda x: arithmetic.multiply(x, x), "tan": functions.tangent},
        **{"atan": functions.arc_tangent, "asin": functions.arc_sine, "acos": functions.arc_cosine},
    }.items():
        RULES[name] = lambda func, x, of_one=of_one: Numbers(of_one(x))


_functions()


@rule("add")
def _add(func: Any, a: Any, b: Any, alpha: Any = 1) -> Numbers:
    second = pair_of(b) if alpha == 1 else arithmetic.multiply(pair_of(b), pair_of(alpha))
    return Numbers(arithmetic.add(pair_of(a), second))


@rule("sub")
def _subtract(func: Any, a: Any, b: Any, alpha: Any = 1) -> Numbers:
    second = pair_of(b) if alpha == 1 else arithmetic.multiply(pair_of(b), pair_of(alpha))
    return Numbers(arithmetic.subtract(pair_of(a), second))


@rule("rsub")
def _reversed_difference(func: Any, a: Any, b: Any, alpha: Any = 1) -> Numbers:
    return Numbers(arithmetic.subtract(pair_of(b), arithmetic.multiply(pair_of(a), pair_of(alpha))))


@rule("mul")
def _multiply(func: Any, a: Any, b: Any) -> Numbers:
    return Numbers(arithmetic.multiply(pair_of(a), pair_of(b)))


@rule("div", "true_divide")
def _divide(func: Any, a: Any, b: Any, rounding_mode: Any = None) -> Numbers:
    if rounding_mode is not None:
        return Numbers(exactly(torch.div(*_exact(func, a, b), rounding_mode=rounding_mode)))
    return Numbers(arithmetic.divide(pair_of(a), pair_of(b)))


@rule("pow")
def _power(func: Any, a: Any, b: Any) -> Numbers:
    return Numbers(functions.power(pair_of(a), pair_of(b)))


@rule("floor_divide")
def _divided_to_whole(func: Any, a: Any, b: Any) -> Numbers:
    return Numbers(exactly(torch.floor_divide(*_exact(func, a, b))))


@rule("lerp")
def _lerp(func: Any, start: Any, end: Any, weight: Any) -> Numbers:
    change = arithmetic.multiply(pair_of(weight), arithmetic.subtract(pair_of(end), pair_of(start)))
    return Numbers(arithmetic.add(pair_of(start), change))


@rule("addcmul")
def _add_product(func: Any, a: Any, b: Any, c: Any, value: Any = 1) -> Numbers:
    return Numbers(arithmetic.add(pair_of(a), arithmetic.multiply(pair_of(value), arithmetic.multiply(pair_of(b), pair_of(c)))))


@rule("addcdiv")
def _add_quotient(func: Any, a: Any, b: Any, c: Any, value: Any = 1) -> Numbers:
    return Numbers(arithmetic.add(pair_of(a), arithmetic.multiply(pair_of(value), arithmetic.divide(pair_of(b), pair_of(c)))))


_COMPARED: dict[str, Callable[[Pair, Pair], Tensor]] = {
    "lt": arithmetic.less,
    "gt": lambda a, b: arithmetic.less(b, a),
    "le": lambda a, b: arithmetic.less(a, b) | arithmetic.equal(a, b),
    "ge": lambda a, b: arithmetic.less(b, a) | arithmetic.equal(a, b),
    "eq": arithmetic.equal,
    "ne": lambda a, b: ~arithmetic.equal(a, b),
}
for _name, _compare in _COMPARED.items():
    RULES[_name] = lambda func, a, b, compare=_compare: compare(pair_of(a), pair_of(b))


@rule("isnan", "isinf", "_local_scalar_dense", "sign", "sgn", "signbit", "item", "is_nonzero", "logical_not", "isfinite")
def _of_the_high_part(func: Any, a: Any) -> Any:
    found = func(a[0])
    return Numbers(exactly(found)) if isinstance(found, Tensor) and found.is_floating_point() else found


@rule("sym_size", "sym_stride", "is_same_size", "is_contiguous")
def _of_the_shape(func: Any, *args: Any) -> Any:
    return func(*[a[0] if isinstance(a, Numbers) else a for a in args])


@rule(
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_empty", "new_full"),
    "new_empty_strided",
)
def _made(func: Any, a: Any, *given: Any, **named: Any) -> Any:
    found = func(a[0], *given, **named)
    return Numbers(exactly(found)) if found.dtype == torch.float64 else found


@rule("_to_copy")
def _copied(func: Any, a: Any, *, dtype: Any = None, **named: Any) -> Any:
    if dtype not in (None, torch.float64):
        return a[0].to(dtype)
    return Numbers((a[0].clone(), a[1].clone()))


@rule("copy")
def _taken_over(func: Any, a: Any, source: Any, non_blocking: bool = False) -> Numbers:
    high, low = pair_of(source)
    return Numbers((high.expand(a[0].shape), low.expand(a[0].shape)))


@rule("fill")
def _filled(func: Any, a: Any, value: Any) -> Numbers:
    high, low = pair_of(value)
    return Numbers((high.expand(a[0].shape), low.expand(a[0].shape)))


@rule("zero")
def _zeroed(func: Any, a: Any) -> Numbers:
    return Numbers(exactly(torch.zeros_like(a[0])))


@rule("masked_fill")
def _masked(func: Any, a: Any, mask: Tensor, value: Any) -> Numbers:
    return Numbers(chosen(mask, pair_of(value), pair_of(a)))


@rule("relu")
def _relu(func: Any, a: Any) -> Numbers:
    return Numbers(chosen(a[0] <= 0, exactly(torch.zeros_like(a[0])), a))


@rule("threshold_backward")
def _past_threshold(func: Any, gradient: Any, a: Any, threshold: Any) -> Numbers:
    return Numbers(chosen(pair_of(a)[0] <= threshold, arithmetic.constant(0.0), pair_of(gradient)))


@rule("softshrink_backward", "hardshrink_backward")
def _past_both_limits(func: Any, gradient: Any, a: Any, limit: Any) -> Numbers:
    inside = pair_of(a)[0].abs() <= limit
    return Numbers(chosen(inside, arithmetic.constant(0.0), pair_of(gradient)))


@rule("hypot")
def _hypotenuse(func: Any, a: Any, b: Any) -> Numbers:
    a, b = pair_of(a), pair_of(b)
    return Numbers(arithmetic.root(arithmetic.add(arithmetic.multiply(a, a), arithmetic.multiply(b, b))))


@rule("maximum")
def _larger(func: Any, a: Any, b: Any) -> Numbers:
    return Numbers(_largest(pair_of(a), pair_of(b)))


@rule("minimum")
def _smaller(func: Any, a: Any, b: Any) -> Numbers:
    return Numbers(_least(pair_of(a), pair_of(b)))


def _largest(a: Pair, b: Pair) -> Pair:
    return chosen(arithmetic.less(a, b) | b[0].isnan(), b, a)


def _least(a: Pair, b: Pair) -> Pair:
    return chosen(arithmetic.less(b, a) | b[0].isnan(), b, a)


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamped(func: Any, a: Any, *given: Any, min: Any = None, max: Any = None) -> Numbers:
    name = func.overloadpacket.__name__.rstrip("_")
    if given and name == "clamp_max":
        max = given[0]
    elif given:
        min, max = given[0], given[1] if len(given) > 1 else max
    found = a if min is None else _largest(a, pair_of(min))
    found = found if max is None else _least(found, pair_of(max))
    return Numbers(chosen(a[0].isnan(), a, found))


def _dims(a: Pair, dim: Any) -> list[int]:
    if dim is None or not a[0].ndim or (not isinstance(dim, int) and len(dim) == 0):
        return [*range(a[0].ndim)]
    return [dim] if isinstance(dim, int) else [int(d) for d in dim]


def _without(pair: Pair, dims: Sequence[int], keepdim: bool) -> Numbers:
    at = tuple(dims)
    return Numbers(pair if keepdim or not pair[0].ndim else (pair[0].squeeze(at), pair[1].squeeze(at)))


@rule("sum")
def _sum(func: Any, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Numbers:
    dims = _dims(a, dim)
    return _without(arithmetic.added_up(a, dims), dims, keepdim)


def _mean_of(a: Pair, dims: Sequence[int], keepdim: bool) -> Numbers:
    count = math.prod(a[0].shape[d] for d in dims)
    total = arithmetic.divide(arithmetic.added_up(a, list(dims)), arithmetic.constant(float(count)))
    return _without(total, dims, keepdim)


@rule("mean")
def _mean(func: Any, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Numbers:
    return _mean_of(a, _dims(a, dim), keepdim)


@rule("prod")
def _product_of_all(func: Any, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Numbers:
    dims = _dims(a, dim)
    return _without(arithmetic.folded(a, dims, arithmetic.multiply, 1.0), dims, keepdim)


@rule("amax", "max")
def _maximum_of(func: Any, a: Any, *given: Any, keepdim: bool = False, **named: Any) -> Any:
    return _extreme(func, _largest, a, *given, keepdim=keepdim, **named)


@rule("amin", "min")
def _minimum_of(func: Any, a: Any, *given: Any, keepdim: bool = False, **named: Any) -> Any:
    return _extreme(func, _least, a, *given, keepdim=keepdim, **named)


def _extreme(
    func: Any, step: Callable[[Pair, Pair], Pair], a: Any, dim: Any = None, keep: bool = False, *, keepdim: bool = False
) -> Any:
    if func.overloadpacket.__name__ in ("max", "min") and dim is not None:
        return _by_place(func, a, dim, keep or keepdim)
    dims = _dims(a, dim)
    return _without(arithmetic.folded(a, dims, step, math.nan), dims, keep or keepdim)


@rule("sort", "topk", "cummax", "cummin", "kthvalue", "mode", "median", "nanmedian")
def _by_place(func: Any, a: Any, *given: Any, **named: Any) -> Any:
    """Choose by the high parts, which is right where no low part is set."""
    if bool((a[1] != 0).any()):
        raise NotImplementedError(f"{func.overloadpacket.__name__} of rounded numbers")
    found = func(a[0], *given, **named)
    return (Numbers(exactly(found[0])), found[1]) if isinstance(found, tuple) else Numbers(exactly(found))


@rule("argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "bucketize", "any", "all")
def _place(func: Any, a: Any, *given: Any, **named: Any) -> Any:
    if bool((a[1] != 0).any()):
        raise NotImplementedError(f"{func.overloadpacket.__name__} of rounded numbers")
    return func(a[0], *given, **named)


def whole_below(a: Pair) -> Tensor:
    """Return the largest whole number that is not above a."""
    high = torch.floor(a[0])
    return torch.where(high == a[0], high + torch.floor(a[1]), high)


@rule("floor", "ceil", "trunc", "frac", "round")
def _whole(func: Any, a: Any, *given: Any, **named: Any) -> Numbers:
    name = func.overloadpacket.__name__
    if name == "floor":
        return Numbers(exactly(whole_below(a)))
    if name == "ceil":
        return Numbers(exactly(-whole_below(arithmetic.negative(a))))
    if bool((a[1] != 0).any()):
        raise NotImplementedError(f"{name} of rounded numbers")
    return Numbers(exactly(func(a[0], *given, **named)))


def _exact(func: Any, *given: Any) -> list[Tensor]:
    """Return arguments as numbers of float64, which they are where nothing was rounded before."""
    pairs = [pair_of(x) for x in given]
    if any(bool((low != 0).any()) for _, low in pairs):
        raise NotImplementedError(f"{func.overloadpacket.__name__} of rounded numbers")
    return [high for high, _ in pairs]


@rule("fmod", "remainder")
def _rest(func: Any, a: Any, b: Any) -> Numbers:
    """The rest of a division is exact; that of the other sign is moved by the divisor."""
    a, b = _exact(func, a, b)
    rest = torch.fmod(a, b)
    if func.overloadpacket.__name__ == "fmod":
        return Numbers(exactly(rest))
    moved = (rest != 0) & (torch.signbit(rest) != torch.signbit(b))
    return Numbers(arithmetic.add(exactly(rest), exactly(torch.where(moved, b, 0.0))))


@rule("fmax", "fmin")
def _extreme_of_numbers(func: Any, a: Any, b: Any) -> Numbers:
    a, b = pair_of(a), pair_of(b)
    least = func.overloadpacket.__name__ == "fmin"
    second = (arithmetic.less(b, a) if least else arithmetic.less(a, b)) | a[0].isnan()
    return Numbers(chosen(second & ~b[0].isnan(), b, a))


@rule("put")
def _put_flat(func: Any, a: Any, index: Tensor, source: Any, accumulate: bool = False) -> Numbers:
    a, (high, low) = pair_of(a), pair_of(source)
    if accumulate:
        return added_at_places(a, index % max(1, a[0].numel()), (high, low))
    return Numbers((torch.put(a[0], index, high), torch.put(a[1], index, low)))


@rule("scatter_reduce")
def _scatter_reduce(
    func: Any, a: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True
) -> Numbers:
    a = pair_of(a)
    if reduce in ("amax", "amin"):
        a, source = _exact(func, a, source)
        return Numbers(exactly(torch.scatter_reduce(a, dim, index, source, reduce, include_self=include_self)))
    if reduce == "prod":
        raise NotImplementedError("scatter_reduce of products")
    ones = torch.ones(index.shape, dtype=torch.float64)
    counts = torch.scatter_reduce(torch.zeros_like(a[0]), dim, index, ones, "sum")
    start = a if include_self else chosen(counts > 0, exactly(torch.zeros_like(a[0])), a)
    total = _scattered(func, Numbers(start), dim, index, source)
    if reduce == "sum":
        return total
    counts = counts + 1 if include_self else counts.clamp_min(1)
    return Numbers(arithmetic.divide(total, exactly(counts)))


@rule("_trilinear")
def _products_of_three(func: Any, a: Any, b: Any, c: Any, *dims: Sequence[int] | int) -> Numbers:
    each: list[Pair] = []
    for one, added in zip((a, b, c), dims[:3], strict=True):
        high, low = pair_of(one)
        for d in added:  # pyright: ignore[reportGeneralTypeIssues]
            high, low = high.unsqueeze(d), low.unsqueeze(d)
        each.append((high, low))
    whole = arithmetic.multiply(arithmetic.multiply(each[0], each[1]), each[2])
    along: Any = dims[3]
    return _without(arithmetic.added_up(whole, [*along]), [*along], False) if along else Numbers(whole)


def _distance(apart: Pair, p: float) -> Numbers:
    return _norm(None, apart, p, [-1])


@rule("_cdist_forward")
def _distances(func: Any, a: Any, b: Any, p: float, mode: Any = None) -> Numbers:
    (ah, al), (bh, bl) = pair_of(a), pair_of(b)
    return _distance(arithmetic.subtract((ah.unsqueeze(-2), al.unsqueeze(-2)), (bh.unsqueeze(-3), bl.unsqueeze(-3))), p)


def _of_distances(g: Pair, apart: Pair, distance: Pair, p: float) -> Pair:
    """Return the gradient of each difference: of no distance none."""
    if p not in (1, 2):
        raise NotImplementedError(f"the gradient of distances with p = {p:g}")
    if p == 1:
        return arithmetic.multiply(g, exactly(torch.sign(apart[0])))
    none = distance[0] == 0
    return arithmetic.multiply(apart, chosen(none, arithmetic.constant(0.0), arithmetic.divide(g, distance)))


@rule("_cdist_backward")
def _gradient_of_distances(func: Any, g: Any, a: Any, b: Any, p: float, distances: Any) -> Numbers:
    a, b, g, distances = (pair_of(x) for x in (a, b, g, distances))
    apart = arithmetic.subtract((a[0].unsqueeze(-2), a[1].unsqueeze(-2)), (b[0].unsqueeze(-3), b[1].unsqueeze(-3)))
    wide: list[Pair] = [(x[0].unsqueeze(-1), x[1].unsqueeze(-1)) for x in (g, distances)]
    found = arithmetic.added_up(_of_distances(wide[0], apart, wide[1], p), [-2])
    return Numbers((found[0].squeeze(-2), found[1].squeeze(-2)))


@rule("_pdist_forward")
def _distances_of_pairs(func: Any, a: Any, p: float = 2) -> Numbers:
    first, second = torch.triu_indices(len(a[0]), len(a[0]), 1)
    return _distance(arithmetic.subtract((a[0][first], a[1][first]), (a[0][second], a[1][second])), p)


@rule("cumsum")
def _running_sum(func: Any, a: Any, dim: int, dtype: Any = None) -> Numbers:
    return Numbers(arithmetic.running(a, dim, arithmetic.add))


@rule("cumprod")
def _running_product(func: Any, a: Any, dim: int, dtype: Any = None) -> Numbers:
    return Numbers(arithmetic.running(a, dim, arithmetic.multiply))


@rule("var", "std", "var_mean", "std_mean")
def _variance(
    func: Any, a: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    name = func.overloadpacket.__name__
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = _dims(a, dim)
    less = (1.0 if unbiased else 0.0) if correction is None else float(correction)
    center = _mean_of(a, dims, True)
    apart = arithmetic.subtract(a, center)
    count = max(0.0, math.prod(a[0].shape[d] for d in dims) - less)
    total = arithmetic.divide(arithmetic.added_up(arithmetic.multiply(apart, apart), dims), arithmetic.constant(count))
    total = _without(arithmetic.root(total) if name.startswith("std") else total, dims, keepdim)
    return (total, _without(center, dims, keepdim)) if name.endswith("_mean") else total


@rule("linalg_vector_norm", "norm")
def _norm(func: Any, a: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, p: Any = None) -> Numbers:
    ord = 2 if ord is None else ord
    dims, size = _dims(a, dim), arithmetic.absolute(a)
    if ord == 2:
        found = arithmetic.root(arithmetic.added_up(arithmetic.multiply(a, a), dims))
    elif ord == 1:
        found = arithmetic.added_up(size, dims)
    elif ord in (math.inf, -math.inf):
        found = arithmetic.folded(size, dims, _largest if ord > 0 else _least, 0.0)
    elif ord == 0:
        found = exactly((a[0] != 0).to(torch.float64).sum(dims, True))
    else:
        total = arithmetic.added_up(functions.power(size, arithmetic.constant(float(ord))), dims)
        found = functions.power(total, arithmetic.divide(functions.ONE, arithmetic.constant(float(ord))))
    return _without(found, dims, keepdim)


def _scaled(a: Any, factor: Any) -> Pair:
    return pair_of(a) if factor == 1 else arithmetic.multiply(pair_of(a), pair_of(factor))


@rule("mm", "bmm")
def _matrices(func: Any, a: Any, b: Any) -> Numbers:
    return _in_order(product(pair_of(a), pair_of(b)))


@rule("mv")
def _matrix_and_vector(func: Any, a: Any, b: Any) -> Numbers:
    (ah, al), (bh, bl) = pair_of(a), pair_of(b)
    high, low = product((ah, al), (bh.unsqueeze(1), bl.unsqueeze(1)))
    return Numbers((high.squeeze(1), low.squeeze(1)))


@rule("dot", "vdot")
def _inner(func: Any, a: Any, b: Any) -> Numbers:
    return _without(arithmetic.added_up(arithmetic.multiply(pair_of(a), pair_of(b)), [0]), [0], False)


@rule("addbmm")
def _added_to_all_products(func: Any, a: Any, b: Any, c: Any, beta: Any = 1, alpha: Any = 1) -> Numbers:
    found = arithmetic.added_up(product(pair_of(b), pair_of(c)), [0])
    whole = _scaled(_without(found, [0], False), alpha)
    return Numbers(whole if beta == 0 else arithmetic.add(whole, _scaled(a, beta)))


@rule("addmm", "baddbmm", "addmv")
def _added_to_product(func: Any, a: Any, b: Any, c: Any, beta: Any = 1, alpha: Any = 1) -> Numbers:
    found = (_matrix_and_vector if func.overloadpacket.__name__.rstrip("_") == "addmv" else _matrices)(func, b, c)
    whole = _scaled(found, alpha)
    return Numbers(whole if beta == 0 else arithmetic.add(whole, _scaled(a, beta)))


def _at_rows(a: Pair, dim: int, index: Tensor, source: Pair) -> Pair:
    if not a[0].ndim:
        return arithmetic.add(a, arithmetic.added_up((source[0].reshape(-1), source[1].reshape(-1)), [0]))
    high, low = (x.movedim(dim, 0) for x in a)
    high, low = arithmetic.added_at((high, low), index.reshape(-1), (source[0].movedim(dim, 0), source[1].movedim(dim, 0)))
    return high.movedim(0, dim).contiguous(), low.movedim(0, dim).contiguous()


@rule("index_add")
def _added_to_rows(func: Any, a: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1) -> Numbers:
    return Numbers(_at_rows(pair_of(a), dim, index, _scaled(source, alpha)))


def added_at_places(a: Pair, places: Tensor, source: Pair) -> Numbers:
    """Return a with numbers added at its places, counted from its first."""
    flat = (a[0].reshape(-1), a[1].reshape(-1))
    high, low = arithmetic.added_at(flat, places.reshape(-1), (source[0].reshape(-1), source[1].reshape(-1)))
    return Numbers((high.view(a[0].shape), low.view(a[0].shape)))


def _numbered(a: Pair) -> Tensor:
    return torch.arange(a[0].numel()).view(a[0].shape)


@rule("scatter_add")
def _scattered(func: Any, a: Any, dim: int, index: Tensor, source: Any) -> Numbers:
    a, (high, low) = pair_of(a), pair_of(source)
    if not index.ndim or not a[0].ndim:
        raise NotImplementedError("scatter_add of one number")
    part = tuple(slice(0, size) for size in index.shape)
    numbers = _numbered(a)
    reach = tuple(slice(None) if d == dim % index.ndim else slice(0, size) for d, size in enumerate(index.shape))
    return added_at_places(a, torch.gather(numbers[reach], dim, index), (high[part], low[part]))


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _put(func: Any, a: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False) -> Numbers:
    a, (high, low) = pair_of(a), pair_of(values)
    places = _numbered(a)[tuple(slice(None) if i is None else i for i in indices)]
    if any(i is None for i in indices[:-1]) and sum(i is not None for i in indices) > 1:
        places = torch.ops.aten.index(_numbered(a), list(indices))
    high, low = high.expand(places.shape), low.expand(places.shape)
    if accumulate:
        return added_at_places(a, places, (high, low))
    out = a[0].clone().reshape(-1), a[1].clone().reshape(-1)
    out[0][places.reshape(-1)], out[1][places.reshape(-1)] = high.reshape(-1), low.reshape(-1)
    return Numbers((out[0].view(a[0].shape), out[1].view(a[0].shape)))


@rule("embedding_dense_backward")
def _embedding_backward(func: Any, g: Any, index: Tensor, rows: int, padding_idx: int, by_frequency: bool) -> Numbers:
    if by_frequency:
        raise NotImplementedError("an embedding's gradient scaled by frequency")
    high, low = (x.reshape(-1, x.shape[-1]) for x in pair_of(g))
    index = index.reshape(-1)
    seen = index != padding_idx
    zeros = exactly(torch.zeros(rows, high.shape[1], dtype=torch.float64))
    return Numbers(arithmetic.added_at(zeros, index[seen], (high[seen], low[seen])))
