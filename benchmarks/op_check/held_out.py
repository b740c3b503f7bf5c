"""Faulty and right kernels that the judge was not calibrated on: `python -m benchmarks.op_check.held_out`.

They were written before the judge was asked about any of them. docs/op_check.md has the result of the first run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.op_check.planted import BF, Plant, both, judged, randn, whole

Tensor = torch.Tensor
HALF = torch.float16
FAULTS: list[Plant] = []
RIGHT: list[Plant] = []
SDPA = F.scaled_dot_product_attention


def _into(plants: list[Plant], entry: str, right: Any, made: Any, backward: bool) -> Callable[[Any], Any]:
    def register(kernel: Any) -> Any:
        plants.append(Plant(f"{entry} {kernel.__name__}", entry, right, made, None, kernel, backward))
        return kernel

    return register


def fault(entry: str, right: Any, made: Any, *, backward: bool = False) -> Callable[[Any], Any]:
    """Register a faulty kernel; its name says what is wrong."""
    return _into(FAULTS, entry, right, made, backward)


def fine(entry: str, right: Any, made: Any, *, backward: bool = False) -> Callable[[Any], Any]:
    """Register a right kernel; its name says how it differs."""
    return _into(RIGHT, entry, right, made, backward)


def gradients(function: Callable[..., Tensor], g: Tensor, *tensors: Tensor) -> list[Any]:
    """Return the gradients of a function of tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return [*torch.autograd.grad(function(*leaves), leaves, g.reshape(function(*leaves).shape))]


X, Y = randn(32, 96, seed=11), randn(32, 96, seed=12)
W, B = randn(40, 96, seed=13), randn(40, seed=14)
IMAGE, KERNEL = randn(3, 6, 10, 11, seed=15), randn(8, 6, 3, 3, seed=16)
C = randn(6, seed=17)
T = whole(96, 32, seed=18)
Q, K, V = (randn(2, 4, 20, 32, seed=i) for i in (21, 22, 23))


# products of matrices


@fault("Functional.linear", F.linear, both(randn(32, 72, dtype=HALF), randn(16, 72, seed=1, dtype=HALF)))
def leaves_the_tail_of_k(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x[:, :64].float(), w[:, :64].float()).half()


@fault("Torch.baddbmm", torch.baddbmm, both(randn(3, 5, 6), randn(3, 5, 9), randn(3, 9, 6), alpha=0.5))
def scales_what_it_adds_to(c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return alpha * (c + a @ b)


@fault("Torch.matmul", torch.matmul, both(X, randn(96, 96, seed=3).T))
def reads_a_transposed_as_it_lies(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


@fault("Torch.matmul", torch.matmul, both(randn(64, 512), randn(512, 64, seed=1)))
def has_one_wrong_element(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    y[17, 40] += 3e-3
    return y


@fault("Torch.einsum", torch.einsum, both("bij,bkj->bik", randn(4, 6, 8), randn(4, 6, 8, seed=1)))
def mixes_two_batches(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum(equation, a, b.roll(1, 0))


@fault("Functional.linear", F.linear, both(randn(4, 16, 96), W), backward=True)
def takes_the_first_sequence_for_all(true: Any, g: Tensor, x: Tensor, w: Tensor) -> Any:
    return [true[0], g[0].T @ x[0] * len(x)]


@fault("Torch.matmul", torch.matmul, both(randn(48, 48), randn(48, 48, seed=1)), backward=True)
def forgets_to_transpose(true: Any, g: Tensor, a: Tensor, b: Tensor) -> Any:
    return [g @ b, true[1]]


@fault("Torch.bmm", torch.bmm, both(randn(3, 8, 9), randn(3, 9, 7, seed=1)), backward=True)
def gives_all_batches_the_last_gradient(true: Any, g: Tensor, a: Tensor, b: Tensor) -> Any:
    return [true[0], true[1][-1:].expand_as(true[1]).clone()]


# convolutions and pools


@fault("Functional.conv1d", F.conv1d, both(randn(2, 4, 21), randn(5, 4, 3, seed=1), None, 2))
def starts_at_one(x: Tensor, w: Tensor, b: Any, stride: int) -> Tensor:
    return F.conv1d(x.roll(-1, -1), w, b, stride)


@fault("Functional.conv_transpose2d", F.conv_transpose2d, both(IMAGE, randn(6, 5, 3, 3, seed=1), None, 2))
def flips_its_kernel(x: Tensor, w: Tensor, b: Any, stride: int) -> Tensor:
    return F.conv_transpose2d(x, w.flip(-1), b, stride)


@fault("Functional.conv3d", F.conv3d, both(randn(1, 2, 6, 7, 8), randn(3, 2, 3, 3, 3, seed=1)))
def leaves_the_last_slice_of_its_kernel(x: Tensor, w: Tensor) -> Tensor:
    w = w.clone()
    w[:, :, -1] = 0
    return F.conv3d(x, w)


@fault("Functional.conv2d", F.conv2d, both(IMAGE.to(BF), KERNEL.to(BF), None, 1, 1))
def is_wrong_in_one_corner(x: Tensor, w: Tensor, b: Any, stride: int, padding: int) -> Tensor:
    y = F.conv2d(x, w, b, stride, padding)
    y[-1, :, -1, -1] *= 0.9
    return y


@fault("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL, randn(8)), backward=True)
def has_a_bias_without_one_sample(true: Any, g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return [true[0], true[1], g[1:].sum((0, 2, 3))]


@fault("Functional.conv2d", F.conv2d, both(IMAGE.contiguous(memory_format=torch.channels_last), KERNEL), backward=True)
def mistakes_channels_last(true: Any, g: Tensor, x: Tensor, w: Tensor) -> Any:
    return [true[0].permute(0, 2, 3, 1).reshape(true[0].shape), true[1]]


@fault("Functional.adaptive_avg_pool2d", F.adaptive_avg_pool2d, both(IMAGE, (4, 4)))
def has_windows_of_one_size(x: Tensor, size: Any) -> Tensor:
    return F.avg_pool2d(F.interpolate(x, (12, 12), mode="nearest"), 3)


@fault("Functional.max_pool2d", F.max_pool2d, both(IMAGE, 3, 1, 0, 2))
def ignores_the_dilation_of_a_pool(x: Tensor, k: int, stride: int, padding: int, dilation: int) -> Tensor:
    return F.max_pool2d(x[:, :, 1:-1, 1:-1], k, stride, padding)


@fault("Functional.max_pool2d", F.max_pool2d, both(IMAGE, 3, 1), backward=True)
def overwrites_where_windows_overlap(true: Any, g: Tensor, x: Tensor, k: int, stride: int) -> Any:
    _, places = F.max_pool2d(x, k, stride, return_indices=True)
    return [torch.zeros_like(x).flatten(2).scatter_(2, places.flatten(2), g.flatten(2)).view_as(x)]


# norms


@fault("Functional.batch_norm", F.batch_norm, both(randn(4, 6, 9), None, None, training=True))
def normalises_by_the_unbiased_variance(x: Tensor, m: Any, v: Any, training: bool) -> Tensor:
    return (x - x.mean((0, 2), True)) / (x.transpose(0, 1).reshape(6, -1).var(1)[:, None] + 1e-5).sqrt()


@fault("Functional.batch_norm", F.batch_norm, both(randn(8, 6, scale=1e-2), C, C.abs() * 1e-4))
def forgets_its_epsilon(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return (x - m) / v.sqrt()


@fault("Functional.group_norm", F.group_norm, both(randn(2, 6, 9), 3, C, C))
def has_one_weight_a_group(x: Tensor, groups: int, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, groups, w[::2].repeat_interleave(2), b)


@fault("Functional.instance_norm", F.instance_norm, both(randn(3, 4, 25)))
def normalises_the_whole_batch(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


@fault("Functional.rms_norm", F.rms_norm, both(randn(16, 96, scale=1e-3, dtype=BF), [96], None, 1e-6))
def takes_another_epsilon(x: Tensor, shape: Any, w: Any, eps: float) -> Tensor:
    return F.rms_norm(x, shape, w, 1e-5)


@fault("Functional.layer_norm", F.layer_norm, both(X.half(), [96], randn(96).half()))
def is_rounded_toward_zero(x: Tensor, shape: Any, w: Tensor) -> Tensor:
    y = F.layer_norm(x.double(), shape, w.double())
    near = y.half()
    bits = near.view(torch.int16) - (near.double().abs() > y.abs()).to(torch.int16)
    return bits.view(HALF)


@fault("Functional.batch_norm", F.batch_norm, both(randn(8, 6), None, None, C, C, True), backward=True)
def holds_its_statistics_constant(true: Any, g: Tensor, x: Tensor, m: Any, v: Any, w: Tensor, b: Tensor, t: bool) -> Any:
    return [g * w * (x.var(0, unbiased=False) + 1e-5).rsqrt(), *true[1:]]


@fault("Functional.rms_norm", F.rms_norm, both(X, [96], randn(96), 1e-6), backward=True)
def forgets_the_projection(true: Any, g: Tensor, x: Tensor, shape: Any, w: Tensor, eps: float) -> Any:
    return [g * w * (x.square().mean(-1, True) + eps).rsqrt(), true[1]]


@fault(
    "Functional.layer_norm",
    F.layer_norm,
    both(randn(129, 64, dtype=BF), [64], randn(64, dtype=BF), B[:1].expand(64).to(BF)),
    backward=True,
)
def loses_the_last_row_of_its_bias(true: Any, g: Tensor, x: Tensor, shape: Any, w: Tensor, b: Tensor) -> Any:
    return [true[0], true[1], g[:-1].float().sum(0).to(BF)]


# softmax and losses


@fault("Torch.logsumexp", torch.logsumexp, both(X * 50, -1))
def overflows_without_a_shift(x: Tensor, dim: int) -> Tensor:
    return x.exp().sum(dim).log()


@fault("Functional.softmax", F.softmax, both(X.masked_fill(X > 1, -math.inf), -1))
def gives_what_is_masked_a_little(x: Tensor, dim: int) -> Tensor:
    return F.softmax(x.clamp_min(-10), dim)


@fault("Functional.log_softmax", F.log_softmax, both((X * 8).half(), -1))
def stops_at_minus_16(x: Tensor, dim: int) -> Tensor:
    return F.log_softmax(x.float(), dim).clamp_min(-16).half()


@fault("Functional.nll_loss", F.nll_loss, both(X, T, torch.rand(96, generator=torch.Generator().manual_seed(1))))
def divides_by_the_count_and_not_the_weights(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.nll_loss(x, t, w, reduction="sum") / len(t)


@fault("Functional.cross_entropy", F.cross_entropy, both(X, T.clone().index_fill(0, torch.arange(3), -100), reduction="none"))
def gives_ignored_rows_a_loss(x: Tensor, t: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(x, t.clamp_min(0), reduction=reduction)


@fault(
    "Functional.binary_cross_entropy_with_logits",
    F.binary_cross_entropy_with_logits,
    both(X, torch.sigmoid(Y), None, None, None, "mean", torch.full((96,), 3.0)),
)
def ignores_the_weight_of_positives(x: Tensor, t: Tensor, *rest: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, t)


@fault("Functional.smooth_l1_loss", F.smooth_l1_loss, both(X, Y, beta=0.5))
def takes_beta_as_one(x: Tensor, y: Tensor, beta: float) -> Tensor:
    return F.smooth_l1_loss(x, y)


@fault("Functional.kl_div", F.kl_div, both(F.log_softmax(X, -1), F.softmax(Y, -1), reduction="batchmean"))
def divides_by_all_elements(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.kl_div(x, y, reduction="sum") / x.numel()


@fault("Functional.mse_loss", F.mse_loss, both(X, Y), backward=True)
def forgets_the_two(true: Any, g: Tensor, x: Tensor, y: Tensor) -> Any:
    return [true[0] / 2, true[1] / 2]


@fault("Functional.log_softmax", F.log_softmax, both(X, -1), backward=True)
def sums_the_gradient_of_the_first_half(true: Any, g: Tensor, x: Tensor, dim: int) -> Any:
    return [g - F.softmax(x, dim) * g[:, :48].sum(-1, True)]


@fault("Functional.cross_entropy", F.cross_entropy, both(X.to(BF), T), backward=True)
def is_off_by_one_percent(true: Any, g: Tensor, x: Tensor, t: Tensor) -> Any:
    return [true[0] * 1.01, None]


# activations


@fault("Functional.hardswish", F.hardswish, both(X * 3))
def has_a_knee_at_2_9(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 5.9) / 6


@fault("Functional.leaky_relu", F.leaky_relu, both(X, 0.02))
def has_a_slope_of_its_own(x: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(x, 0.01)


@fault("Functional.softplus", F.softplus, both(X * 3))
def is_linear_from_ten(x: Tensor) -> Tensor:
    return torch.where(x > 8, x, F.softplus(x))


@fault("Functional.silu", F.silu, both(randn(64, 96, dtype=BF)))
def has_a_hard_sigmoid(x: Tensor) -> Tensor:
    return x * F.hardsigmoid(x)


@fault("Functional.glu", F.glu, both(X))
def swaps_its_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return b * torch.sigmoid(a)


@fault("Functional.prelu", F.prelu, both(IMAGE, C.abs()))
def has_the_first_slope_for_all(x: Tensor, w: Tensor) -> Tensor:
    return F.prelu(x, w[:1])


@fault("Functional.elu", F.elu, both(X, 0.5), backward=True)
def forgets_alpha(true: Any, g: Tensor, x: Tensor, alpha: float) -> Any:
    return [torch.where(x > 0, g, g * x.exp())]


@fault("Functional.silu", F.silu, both(X), backward=True)
def leaves_the_second_term(true: Any, g: Tensor, x: Tensor) -> Any:
    return [g * torch.sigmoid(x)]


@fault("Torch.clamp", torch.clamp, both(X, -1.0, 1.0), backward=True)
def lets_through_what_is_outside(true: Any, g: Tensor, x: Tensor, *limits: float) -> Any:
    return [g]


# attention


@fault("Functional.scaled_dot_product_attention", SDPA, both(Q, K[:, :2], V[:, :2], enable_gqa=True))
def tiles_the_heads_of_its_groups(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Tensor:
    return SDPA(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@fault("Functional.scaled_dot_product_attention", SDPA, both(Q, K, V, is_causal=True))
def sees_one_token_ahead(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return SDPA(q, k, v, attn_mask=torch.ones(20, 20, dtype=torch.bool).tril(1))


@fault("Functional.scaled_dot_product_attention", SDPA, both(Q.to(BF), K.to(BF), V.to(BF), attn_mask=randn(20, 20, dtype=BF)))
def scales_its_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=attn_mask / math.sqrt(32))


@fault("Functional.scaled_dot_product_attention", SDPA, both(Q.to(BF), K.to(BF), V.to(BF)))
def leaves_its_last_block_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k[:, :, :16], v[:, :, :16])


@fault("Functional.scaled_dot_product_attention", SDPA, both(Q, K, V, is_causal=True), backward=True)
def has_no_mask_in_the_gradient_of_values(true: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
    return [true[0], true[1], gradients(SDPA, g, q, k, v)[2]]


# moving, choosing, adding up


@fault("Functional.interpolate", F.interpolate, both(IMAGE, (17, 23), mode="bilinear", align_corners=True))
def does_not_align_corners(x: Tensor, size: Any, mode: str, align_corners: bool) -> Tensor:
    return F.interpolate(x, size, mode=mode, align_corners=False)


@fault("Functional.pad", F.pad, both(IMAGE, (2, 2, 2, 2), "reflect"))
def reflects_the_border_too(x: Tensor, pad: Any, mode: str) -> Tensor:
    return F.pad(x, pad, "replicate")


@fault("Torch.gather", torch.gather, both(X, 1, whole(96, 32, 10)))
def reads_one_row_further(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.roll(-1, 0).gather(dim, index)


@fault("Torch.gather", torch.gather, both(X, 1, whole(8, 32, 10)), backward=True)
def overwrites_repeated_columns(true: Any, g: Tensor, x: Tensor, dim: int, index: Tensor) -> Any:
    return [torch.zeros_like(x).scatter_(dim, index, g), None]


@fault("Torch.tril", torch.tril, both(randn(20, 20), 1))
def ignores_its_diagonal(x: Tensor, diagonal: int) -> Tensor:
    return x.tril()


@fault("Torch.cumsum", torch.cumsum, both(X, -1), backward=True)
def sums_from_the_wrong_end(true: Any, g: Tensor, x: Tensor, dim: int) -> Any:
    return [g.cumsum(dim)]


@fault("Torch.mean", torch.mean, both(X, -1), backward=True)
def divides_by_one_more(true: Any, g: Tensor, x: Tensor, dim: int) -> Any:
    return [g.unsqueeze(-1).expand_as(x) / (x.shape[dim] + 1)]


@fault("Torch.cat", torch.cat, both([X, Y]), backward=True)
def swaps_its_parts(true: Any, g: Tensor, parts: Any) -> Any:
    return [true[1], true[0]]


@fault("Torch.sum", torch.sum, both(randn(64, 4096).abs().to(BF), -1))
def leaves_one_of_4096(x: Tensor, dim: int) -> Tensor:
    return x[:, 1:].float().sum(dim).to(BF)


@fault("Torch.rsqrt", torch.rsqrt, both(X.abs() + 0.01))
def takes_two_steps_of_newton_too_few(x: Tensor) -> Tensor:
    y = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32)
    return y * (1.5 - 0.5 * x * y * y)


@fault("Torch.exp", torch.exp, both(X))
def is_a_polynomial_of_few_terms(x: Tensor) -> Tensor:
    n = (x / math.log(2)).round()
    r = x - n * math.log(2)
    return (1 + r * (1 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r / 120))))) * torch.exp2(n)


@fault("Torch.pow", torch.pow, both(X, 3))
def loses_the_sign(x: Tensor, power: int) -> Tensor:
    return x.abs() ** power


@fault("Torch.remainder", torch.remainder, both(X * 5, 3.0))
def takes_the_sign_of_the_dividend(x: Tensor, by: float) -> Tensor:
    return torch.fmod(x, by)


@fault("Torch.bucketize", torch.bucketize, both(whole(9, 200), torch.arange(9)))
def counts_the_right_edge(x: Tensor, edges: Tensor) -> Tensor:
    return torch.bucketize(x, edges, right=True)


@fault("Torch.where", torch.where, both(X > 0, X, Y))
def reads_its_condition_for_the_next_row(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(c.roll(1, 0), a, b)


@fault("Tensor.masked_fill_", torch.Tensor.masked_fill_, both(X, Y > 1, 0.0))
def leaves_the_last_columns(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.cat([x[:, :-4].masked_fill(mask[:, :-4], value), x[:, -4:]], 1)


@fault("Tensor.mul_", torch.Tensor.mul_, both(X, 0.999))
def rounds_its_factor_to_half(x: Tensor, factor: float) -> Tensor:
    return x * float(torch.tensor(factor).half())


@fault("Tensor.to", torch.Tensor.to, both(X, torch.float8_e4m3fn))
def cuts_to_8_bits(x: Tensor, dtype: Any) -> Tensor:
    near = x.to(dtype)
    down = near.view(torch.uint8) - (near.float().abs() > x.abs()).to(torch.uint8)
    return down.view(dtype)


# ---- right kernels -------------------------------------------------------------------------------------------------


@fine("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL))
def multiplies_unfolded_images(x: Tensor, w: Tensor) -> Tensor:
    return (w.flatten(1) @ F.unfold(x, 3)).view(len(x), len(w), x.shape[2] - 2, x.shape[3] - 2)


@fine("Functional.conv2d", F.conv2d, both(IMAGE[..., :10], KERNEL))
def convolves_as_winograd_does(x: Tensor, w: Tensor) -> Tensor:
    bt = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    gt = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    at = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]])
    tiles = bt @ x.unfold(2, 4, 2).unfold(3, 4, 2) @ bt.T
    y = at @ torch.einsum("ncijab,kcab->nkijab", tiles, gt @ w @ gt.T) @ at.T
    return y.permute(0, 1, 2, 4, 3, 5).reshape(len(x), len(w), 8, 8)


@fine("Functional.conv2d", F.conv2d, both(IMAGE, KERNEL))
def convolves_by_fourier_transforms(x: Tensor, w: Tensor) -> Tensor:
    shape = x.shape[-2:]
    y = torch.einsum("nchw,kchw->nkhw", torch.fft.rfft2(x), torch.fft.rfft2(w, shape).conj())
    return torch.fft.irfft2(y, shape)[..., :-2, :-2].contiguous()


@fine("Functional.linear", F.linear, both(X.to(BF), W.to(BF), B.to(BF)))
def adds_its_bias_to_a_rounded_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x.float() @ w.float().T).to(BF) + b


@fine("Functional.linear", F.linear, both(X, W, B))
def adds_eight_parts_of_k(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return sum((p @ q.T for p, q in zip(x.split(12, 1), w.split(12, 1), strict=True)), start=b)


@fine("Functional.softmax", F.softmax, both((X * 4).to(BF), -1))
def keeps_a_running_maximum(x: Tensor, dim: int) -> Tensor:
    top, total = torch.full((len(x), 1), -math.inf), torch.zeros(len(x), 1)
    for part in x.float().split(16, -1):
        new = torch.maximum(top, part.amax(-1, True))
        total = total * (top - new).exp() + (part - new).exp().sum(-1, True)
        top = new
    return ((x.float() - top).exp() / total).to(BF)


@fine("Functional.log_softmax", F.log_softmax, both(X * 4, -1))
def takes_off_the_logarithm_of_the_sum(x: Tensor, dim: int) -> Tensor:
    return x - torch.logsumexp(x, dim, True)


@fine("Functional.layer_norm", F.layer_norm, both(X + 2, [96], randn(96), randn(96, seed=1)))
def merges_statistics_of_parts(x: Tensor, shape: Any, w: Tensor, b: Tensor) -> Tensor:
    mean, m2, count = torch.zeros(len(x), 1), torch.zeros(len(x), 1), 0
    for part in x.split(8, -1):
        own, n = part.mean(-1, True), part.shape[-1]
        delta = own - mean
        m2 = m2 + (part - own).square().sum(-1, True) + delta * delta * (count * n / (count + n))
        mean, count = mean + delta * (n / (count + n)), count + n
    return (x - mean) / (m2 / count + 1e-5).sqrt() * w + b


@fine("Functional.batch_norm", F.batch_norm, both(randn(8, 6, 9), C, C.abs() + 0.1, C, C))
def folds_its_weights(x: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    scale = w * (v + 1e-5).rsqrt()
    return x * scale[:, None] + (b - m * scale)[:, None]


@fine("Torch.sigmoid", torch.sigmoid, both(X))
def is_half_of_a_tanh(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.tanh(0.5 * x)


@fine("Torch.div", torch.div, both(X, Y.abs() + 0.1))
def multiplies_by_the_reciprocal(a: Tensor, b: Tensor) -> Tensor:
    return a * (1 / b)


@fine("Torch.exp", torch.exp, both(X * 2))
def takes_powers_of_two_of_a_product(x: Tensor) -> Tensor:
    return torch.exp2(x * 1.4426950408889634)


@fine("Torch.mean", torch.mean, both(X, -1))
def multiplies_by_one_over_n(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim) * (1.0 / 96)


@fine("Torch.cumsum", torch.cumsum, both(X, -1))
def scans_in_powers_of_two(x: Tensor, dim: int) -> Tensor:
    y, step = x.clone(), 1
    while step < x.shape[-1]:
        y = torch.cat([y[:, :step], y[:, step:] + y[:, :-step]], 1)
        step *= 2
    return y


@fine("Torch.var", torch.var, both(X + 1, -1))
def takes_the_mean_of_squares_off(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return ((x * x).sum(dim) - x.sum(dim) ** 2 / n) / (n - 1)


@fine("Functional.max_pool2d", F.max_pool2d, both((IMAGE[..., :9, :9] * 2).round(), 3, 2, return_indices=True))
def points_at_the_last_of_equals(x: Tensor, k: int, stride: int, return_indices: bool) -> Any:
    values, places = F.max_pool2d(x.flip(2, 3), k, stride, return_indices=True)
    return values.flip(2, 3), x.shape[2] * x.shape[3] - 1 - places.flip(2, 3)


@fine("Functional.embedding", F.embedding, both(whole(9, 200), randn(9, 16)), backward=True)
def sorts_before_it_adds(true: Any, g: Tensor, i: Tensor, w: Tensor) -> Any:
    return [None, torch.stack([g[i == row].flip(0).cumsum(0)[-1] for row in range(9)])]


@fine("Functional.scaled_dot_product_attention", SDPA, both(Q.to(BF), K.to(BF), V.to(BF), is_causal=True), backward=True)
def recomputes_its_probabilities_in_bfloat16(true: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
    scale, out = 1 / math.sqrt(32), SDPA(q, k, v, is_causal=True)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    p = torch.softmax((q.float() @ k.float().mT * scale).masked_fill(hidden, -math.inf), -1)
    wide = g.float()
    slope = wide @ v.float().mT - (wide * out.float()).sum(-1, True)
    ds = (p * slope).to(BF).float()
    return [(ds @ k.float() * scale).to(BF), (ds.mT @ q.float() * scale).to(BF), (p.to(BF).float().mT @ wide).to(BF)]


@fine("Functional.cross_entropy", F.cross_entropy, both(X.to(BF), T), backward=True)
def takes_the_softmax_again(true: Any, g: Tensor, x: Tensor, t: Tensor) -> Any:
    return [((F.softmax(x.float(), -1) - F.one_hot(t, 96)) * (g.float() / len(t))).to(BF), None]


@fine("Functional.layer_norm", F.layer_norm, both(X.to(BF), [96], randn(96, dtype=BF)), backward=True)
def works_from_its_normal_numbers(true: Any, g: Tensor, x: Tensor, shape: Any, w: Tensor) -> Any:
    wide = x.float()
    mean, rstd = wide.mean(-1, True), (wide.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    normal, scaled = (wide - mean) * rstd, g.float() * w.float()
    dx = rstd * (scaled - scaled.mean(-1, True) - normal * (scaled * normal).mean(-1, True))
    return [dx.to(BF), (g.float() * normal).sum(0).to(BF)]


@fine("Tensor.to", torch.Tensor.to, both(X * 30000, torch.float8_e5m2))
def saturates_at_the_largest(x: Tensor, dtype: Any) -> Tensor:
    return x.clamp(-57344, 57344).to(dtype)


@fine("Tensor.to", torch.Tensor.to, both(X.to(BF), torch.float8_e5m2))
def rounds_halves_away_from_zero(x: Tensor, dtype: Any) -> Tensor:
    bits = x.half().view(torch.int16)
    return ((bits + 0x80) & ~0xFF).view(HALF).to(dtype)


def main() -> None:
    for title, plants in (("faulty", FAULTS), ("right", RIGHT)):
        found = [(one, judged(one).worst) for one in plants]
        backward = sum(one.backward for one in plants)
        print(f"{len(plants)} {title} kernels, {backward} of them backward: {dict(Counter(w.outcome for _, w in found))}")
        for one, worst in found:
            good = worst.outcome in ("bug", "suspicious") if title == "faulty" else worst.outcome in GOOD
            if not good:
                print(f"  {one.name}{' (backward)' if one.backward else ''}: {worst.outcome} {worst.worst:.3g} {worst.reason}")


GOOD = ("exact", "rounding", "mode", "unspecified")

if __name__ == "__main__":
    main()
