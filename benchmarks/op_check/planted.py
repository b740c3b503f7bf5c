"""Operators with one fault each, on inputs that reveal it and on inputs that hide it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from trainprobe.op_check.cases import Case, Tensor, flat
from trainprobe.op_check.check import Checked, check

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Plant:
    """reveal, hide: make arguments. broken: gives the outputs, or the gradients of all tensor arguments."""

    name: str
    entry: str
    right: Callable[..., Any]
    reveal: Callable[[], Call]
    hide: Callable[[], Call] | None
    broken: Callable[..., Any]
    backward: bool = False


PLANTS: list[Plant] = []


def plant(
    entry: str, right: Callable[..., Any], reveal: Any, hide: Any = None, *, backward: bool = False
) -> Callable[[Any], Any]:
    """Register a faulty function; its name says what is wrong."""

    def register(broken: Any) -> Any:
        PLANTS.append(Plant(f"{entry} {broken.__name__}", entry, right, reveal, hide, broken, backward))
        return broken

    return register


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Return normal numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Return whole numbers from 0 to high − 1."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def both(*args: Any, **kwargs: Any) -> Callable[[], Call]:
    """Return a maker of these arguments."""
    return lambda: (args, kwargs)


def judged(one: Plant, hidden: bool = False) -> Checked:
    """Return what op_check says of the faulty result."""
    maker = one.hide if hidden and one.hide is not None else one.reveal
    args, kwargs = maker()
    torch.manual_seed(1)
    given = [*flat((args, kwargs))]
    case = Case(one.entry, args, kwargs, requires_grad=[t.is_floating_point() for t in given])
    if not one.backward:
        case.outputs = [*flat([one.broken(*args, **kwargs)])]
        return check(case)
    y = one.right(*args, **kwargs)
    gradient = randn(*y.shape, seed=9, dtype=y.dtype)
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    count = iter(leaves)
    from trainprobe.op_check.cases import mapped

    again, named = mapped((args, kwargs), lambda t: next(count))
    floats = [t for t in leaves if t.is_floating_point()]
    true = iter(torch.autograd.grad(one.right(*again, **named), floats, gradient, allow_unused=True))
    results = [next(true) if t.is_floating_point() else None for t in leaves]
    case.outputs, case.gradients, case.of_inputs = [y], [gradient], True
    case.results = one.broken(results, gradient, *args, **kwargs)
    return check(case, backward=True)


X, W, B = randn(24, 64), randn(48, 64, seed=1), randn(48, seed=2)
BF = torch.bfloat16


@plant("Functional.linear", F.linear, both(X, W, B), both(X, W, torch.zeros(48)))
def forgets_its_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w)


def _no_last(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], 1)


@plant("Functional.linear", F.linear, both(X, W, B), both(_no_last(X), W, B))
def loses_a_term(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x[:, :-1], w[:, :-1], b)


@plant("Functional.linear", F.linear, both(X.to(BF), W.to(BF)), both(_no_last(X).to(BF), W.to(BF)))
def loses_a_term_in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x[:, :-1].float(), w[:, :-1].float()).to(x.dtype)


@plant("Functional.linear", F.linear, both(X, W), both(torch.cat([X[:-1], X[-1:] * 0]), W))
def leaves_its_last_row(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    y[-1] = 0
    return y


@plant("Torch.matmul", torch.matmul, both(X, randn(64, 64, seed=3)), both(X, randn(64, 64, seed=3) * 0 + 2))
def takes_the_transposed(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T.contiguous()


@plant(
    "Torch.bmm", torch.bmm, both(randn(4, 8, 9), randn(4, 9, 7, seed=1)), both(randn(4, 8, 9), randn(1, 9, 7).repeat(4, 1, 1))
)
def takes_the_first_batch(a: Tensor, b: Tensor) -> Tensor:
    return a @ b[:1]


@plant("Torch.addmm", torch.addmm, both(B, X, W.T, beta=0.5), both(B * 0, X, W.T, beta=0.5))
def ignores_beta(c: Tensor, a: Tensor, b: Tensor, beta: float) -> Tensor:
    return c + a @ b


@plant("Functional.softmax", F.softmax, both(X * 60, -1), both(X, -1))
def does_not_shift(x: Tensor, dim: int) -> Tensor:
    return x.exp() / x.exp().sum(dim, True)


@plant("Functional.softmax", F.softmax, both(randn(16, 16), -1), both(torch.ones(16, 16), -1))
def takes_another_dimension(x: Tensor, dim: int) -> Tensor:
    return F.softmax(x, 0)


@plant("Functional.log_softmax", F.log_softmax, both(X * 4, -1))
def adds_an_epsilon(x: Tensor, dim: int) -> Tensor:
    return (F.softmax(x, dim) + 1e-6).log()


T = whole(64, 24)


@plant("Functional.cross_entropy", F.cross_entropy, both(X, T.clone().index_fill(0, torch.arange(5), -100)), both(X, T))
def counts_what_is_ignored(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, reduction="sum") / len(t)


@plant("Functional.cross_entropy", F.cross_entropy, both(X, T, label_smoothing=0.1), both(X, T, label_smoothing=0.0))
def ignores_smoothing(x: Tensor, t: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(x, t)


G = randn(64, seed=4)


@plant("Functional.layer_norm", F.layer_norm, both(X, [64], G, G), both(X * 0, [64], G, G))
def divides_by_one_less(x: Tensor, shape: Any, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w + b


@plant("Functional.layer_norm", F.layer_norm, both(X * 0.01, [64], None, None, 1e-5), both(X, [64], None, None, 0.0))
def adds_epsilon_outside_the_root(x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Tensor:
    return (x - x.mean(-1, True)) / (x.var(-1, keepdim=True, unbiased=False).sqrt() + eps)


@plant("Functional.layer_norm", F.layer_norm, both(X, [64], G), both(X, [64], torch.ones(64)))
def shifts_its_weight(x: Tensor, shape: Any, w: Tensor) -> Tensor:
    return F.layer_norm(x, shape, w.roll(1))


@plant("Functional.rms_norm", F.rms_norm, both(X + 1, [64], G, 1e-6), both(X * 0, [64], G, 1e-6))
def takes_off_the_mean(x: Tensor, shape: Any, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x - x.mean(-1, True), shape, w, eps)


@plant("Functional.group_norm", F.group_norm, both(randn(2, 8, 9), 4), both(randn(2, 1, 9).repeat(1, 8, 1), 4))
def takes_half_the_groups(x: Tensor, groups: int) -> Tensor:
    return F.group_norm(x, groups // 2)


@plant("Functional.batch_norm", F.batch_norm, both(randn(4, 8, 9), torch.zeros(8), torch.ones(8)))
def takes_the_batch_in_evaluation(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return F.batch_norm(x, m.clone(), v.clone(), training=True)


Q, K, V = (randn(2, 2, 12, 16, seed=i) for i in range(3))
SDPA = F.scaled_dot_product_attention


@plant("Functional.scaled_dot_product_attention", SDPA, both(Q, K, V), both(Q * 0, K, V))
def scales_by_d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, scale=1 / 16)


@plant("Functional.scaled_dot_product_attention", SDPA, both(Q[:, :, :6], K, V, is_causal=True), both(Q, K, V, is_causal=True))
def has_its_corner_at_the_lower_right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return SDPA(q, k, v, attn_mask=mask)


MASK = torch.rand(12, 12, generator=torch.Generator().manual_seed(5)) < 0.5
MASK[:, 0], MASK[:, 1] = True, False


@plant("Functional.scaled_dot_product_attention", SDPA, both(Q, K, V, attn_mask=MASK))
def inverts_its_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=~attn_mask)


@plant("Functional.gelu", F.gelu, both(X), both(X * 0))
def takes_the_other_approximation(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@plant("Functional.gelu", F.gelu, both(X, approximate="tanh"), both(X * 1e-4, approximate="tanh"))
def has_a_rounded_constant(x: Tensor, approximate: str) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.0447 * x**3)))


@plant("Functional.silu", F.silu, both(randn(256, 64, dtype=BF)), both(X.to(BF) * 0))
def is_off_by_a_factor_below_rounding(x: Tensor) -> Tensor:
    return (F.silu(x.float()) * 1.002).to(x.dtype)


@plant("Torch.tanh", torch.tanh, both(X * 3), both(X * 0.1))
def saturates_early(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 4, x.sign(), torch.tanh(x))


@plant("Torch.sigmoid", torch.sigmoid, both(X))
def calculates_in_half(x: Tensor) -> Tensor:
    return torch.sigmoid(x.half()).float()


@plant("Functional.relu", F.relu, both(X * 9), both(X))
def stops_at_six(x: Tensor) -> Tensor:
    return F.relu6(x)


@plant("Functional.embedding", F.embedding, both(torch.arange(50), randn(50, 8)), both(whole(49, 30), randn(50, 8)))
def never_reads_the_last_row(i: Tensor, w: Tensor) -> Tensor:
    return w[i.clamp_max(len(w) - 2)]


IMAGE, KERNEL = randn(2, 4, 9, 9), randn(6, 4, 3, 3, seed=1)


@plant("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL, None, 1, 1), both(F.pad(IMAGE, (0, 1, 0, 1)), KERNEL, None, 1, 0))
def pads_with_the_border(x: Tensor, w: Tensor, b: Any, stride: int, padding: int) -> Tensor:
    return F.conv2d(F.pad(x, (padding,) * 4, "replicate"), w) if padding else F.conv2d(x, w)


@plant("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL, None, 1, 2, 2), both(IMAGE * 0, KERNEL, None, 1, 2, 2))
def ignores_dilation(x: Tensor, w: Tensor, b: Any, stride: int, padding: int, dilation: int) -> Tensor:
    return F.conv2d(x, w, b, stride, 1)


@plant(
    "Functional.conv2d",
    F.conv2d,
    both(IMAGE, KERNEL[:, :2], None, 1, 0, 1, 2),
    both(IMAGE * 0 + 1, KERNEL[:, :2], None, 1, 0, 1, 2),
)
def swaps_its_groups(x: Tensor, w: Tensor, b: Any, stride: int, padding: int, dilation: int, groups: int) -> Tensor:
    return F.conv2d(x.roll(2, 1), w, b, stride, padding, dilation, groups)


@plant("Functional.avg_pool2d", F.avg_pool2d, both(IMAGE, 3, 2, 1), both(IMAGE, 3, 2, 0))
def does_not_count_the_padding(x: Tensor, k: int, stride: int, padding: int) -> Tensor:
    return F.avg_pool2d(x, k, stride, padding, count_include_pad=False)


@plant("Functional.max_pool2d", F.max_pool2d, both(-IMAGE.abs(), 3, 2, 1), both(IMAGE.abs(), 3, 2, 1))
def pads_with_zero(x: Tensor, k: int, stride: int, padding: int) -> Tensor:
    return F.max_pool2d(F.pad(x, (padding,) * 4), k, stride)


@plant("Functional.dropout", F.dropout, both(randn(64, 64), p=0.2), both(randn(64, 64), p=0.0))
def does_not_scale(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) * (1 - p)


@plant("Functional.dropout", F.dropout, both(randn(64, 64), p=0.2))
def drops_too_few(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p / 2) * (1 - p / 2) / (1 - p)


@plant("Torch.sum", torch.sum, both(randn(6, 67), -1), both(randn(6, 64), -1))
def drops_the_last_block(x: Tensor, dim: int) -> Tensor:
    return x[:, : x.shape[1] // 4 * 4].sum(dim)


@plant("Torch.mean", torch.mean, both(X + 1, -1), both(X * 0, -1))
def divides_the_mean_by_one_less(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim) / (x.shape[dim] - 1)


@plant("Torch.cumsum", torch.cumsum, both(randn(2, 1500).abs(), -1), both(randn(2, 900).abs(), -1))
def starts_anew_at_1024(x: Tensor, dim: int) -> Tensor:
    return torch.cat([part.cumsum(dim) for part in x.split(1024, dim)], dim)


@plant("Torch.var", torch.var, both(X, -1), both(X * 0, -1))
def has_the_biased_variance(x: Tensor, dim: int) -> Tensor:
    return x.var(dim, unbiased=False)


@plant("Torch.exp", torch.exp, both(randn(64, 8, scale=40.0)), both(X))
def is_cut_at_80(x: Tensor) -> Tensor:
    return x.clamp_max(80).exp()


@plant("Torch.add", torch.add, both(X, X + 1, alpha=0.3), both(X, X + 1, alpha=1))
def ignores_alpha(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return a + b


@plant("Tensor.lerp_", torch.Tensor.lerp_, both(X, X + 1, 0.1), both(X, X + 1, 0.5))
def takes_the_other_weight(a: Tensor, b: Tensor, w: float) -> Tensor:
    return a.lerp(b, 1 - w)


@plant(
    "Tensor.addcdiv_", torch.Tensor.addcdiv_, both(X, X, X.abs() + 0.1, value=-0.01), both(X, X * 0, X.abs() + 0.1, value=-0.01)
)
def has_an_approximate_quotient(p: Tensor, a: Tensor, b: Tensor, value: float) -> Tensor:
    return p + value * a * (1 / b).half().float()


@plant("Tensor.addcmul_", torch.Tensor.addcmul_, both(X, X, X, value=0.001), both(X, X * 0, X, value=0.001))
def forgets_the_square(v: Tensor, a: Tensor, b: Tensor, value: float) -> Tensor:
    return v + value * a


@plant("Torch.mul", torch.mul, both(X.masked_fill(X > 2, math.nan), X), both(X, X))
def swallows_nan(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).nan_to_num(0)


@plant("Torch.argmax", torch.argmax, both(X, -1), both(X * 0, -1))
def finds_the_least_in_one_row(x: Tensor, dim: int) -> Tensor:
    y = x.argmax(dim)
    y[3] = x[3].argmin()
    return y


@plant("Torch.topk", torch.topk, both(X, 4))
def repeats_an_index(x: Tensor, k: int) -> Any:
    values, places = x.topk(k)
    places[:, 1] = places[:, 0]
    return values, places


@plant("Torch.sort", torch.sort, both(X), both(X * 0))
def swaps_two(x: Tensor) -> Any:
    values, places = x.sort()
    values[:, [3, 4]] = values[:, [4, 3]]
    return values, places


@plant("Torch.cat", torch.cat, both([X, X + 1]), both([X, X]))
def copies_the_first_twice(parts: list[Tensor]) -> Tensor:
    return torch.cat([parts[0], parts[0]])


@plant("Torch.index_add", torch.index_add, both(X, 0, T % 24, X), both(X, 0, torch.arange(24), X))
def loses_repeated_places(x: Tensor, dim: int, i: Tensor, s: Tensor) -> Tensor:
    return x.clone().index_copy_(0, i, x[i] + s)


@plant("Functional.linear", F.linear, both(X, W, B), both(_last_zero := torch.cat([X[:-1], X[-1:] * 0]), W, B), backward=True)
def leaves_a_sample_out(true: Any, g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return [true[0], g[:-1].T @ x[:-1], true[2]]


@plant("Functional.linear", F.linear, both(X, W, B), backward=True)
def halves_the_gradient_of_its_bias(true: Any, g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return [true[0], true[1], true[2] / 2]


@plant(
    "Functional.embedding",
    F.embedding,
    both(whole(9, 40), randn(9, 8), 2),
    both(whole(9, 40).clamp_min(3), randn(9, 8), 2),
    backward=True,
)
def has_a_gradient_for_padding(true: Any, g: Tensor, i: Tensor, w: Tensor, padding: int) -> Any:
    return [None, torch.zeros_like(w).index_add_(0, i, g)]


@plant("Functional.embedding", F.embedding, both(whole(9, 40), randn(9, 8)), both(torch.arange(9), randn(9, 8)), backward=True)
def overwrites_repeated_rows(true: Any, g: Tensor, i: Tensor, w: Tensor) -> Any:
    return [None, torch.zeros_like(w).index_copy_(0, i, g)]


@plant("Functional.layer_norm", F.layer_norm, both(X, [64], G), backward=True)
def forgets_the_mean_of_the_gradient(true: Any, g: Tensor, x: Tensor, shape: Any, w: Tensor) -> Any:
    mean, rstd = x.mean(-1, True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    normal, scaled = (x - mean) * rstd, g * w
    return [rstd * (scaled - normal * (scaled * normal).mean(-1, True)), true[1]]


@plant("Functional.softmax", F.softmax, both(X, -1), backward=True)
def does_not_take_off_the_sum(true: Any, g: Tensor, x: Tensor, dim: int) -> Any:
    return [g * F.softmax(x, dim)]


@plant("Functional.cross_entropy", F.cross_entropy, both(X, T), both(X[:1], T[:1]), backward=True)
def is_not_divided_by_the_batch(true: Any, g: Tensor, x: Tensor, t: Tensor) -> Any:
    return [true[0] * len(t), None]


@plant("Functional.gelu", F.gelu, both(X), backward=True)
def has_the_slope_of_the_approximation(true: Any, g: Tensor, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate="tanh"), [x], g)


@plant("Functional.scaled_dot_product_attention", SDPA, both(Q, K, V), backward=True)
def does_not_scale_the_gradient_of_keys(true: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return [true[0], true[1] * 4, true[2]]


@plant("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL), backward=True)
def leaves_the_last_row_of_outputs(true: Any, g: Tensor, x: Tensor, w: Tensor) -> Any:
    w = w.clone().requires_grad_()
    return [true[0], *torch.autograd.grad(F.conv2d(x[:, :, :-1], w), [w], g[:, :, :-1])]


@plant("Functional.avg_pool2d", F.avg_pool2d, both(IMAGE, 3, 2, 1), backward=True)
def is_wrong_at_the_border(true: Any, g: Tensor, x: Tensor, *rest: int) -> Any:
    wrong = true[0].clone()
    wrong[:, :, 0] *= 1.5
    return [wrong]


@plant("Torch.tanh", torch.tanh, both(X), both(X * 0), backward=True)
def forgets_to_square(true: Any, g: Tensor, x: Tensor) -> Any:
    return [g * (1 - x.tanh().abs())]


@plant("Functional.rms_norm", F.rms_norm, both(X, [64], G, 1e-6), backward=True)
def has_the_gradient_of_one_row_for_its_weight(true: Any, g: Tensor, x: Tensor, shape: Any, w: Tensor, eps: float) -> Any:
    return [true[0], (g * F.rms_norm(x, shape, None, eps))[0]]
