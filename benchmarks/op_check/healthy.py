"""Kernels that differ from torch's on this machine and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.op_check.planted import BF, IMAGE, KERNEL, MASK, G, K, Q, T, V, W, X, both, randn
from trainprobe.op_check.cases import Case, Tensor, flat
from trainprobe.op_check.check import Checked, check

HEALTHY: list[tuple[str, str, Any, Callable[..., Any]]] = []


def healthy(entry: str, made: Any) -> Callable[[Any], Any]:
    """Register a right kernel; its name says how it differs."""

    def register(kernel: Any) -> Any:
        HEALTHY.append((f"{entry} {kernel.__name__}", entry, made, kernel))
        return kernel

    return register


def judged(entry: str, made: Any, kernel: Any) -> Checked:
    """Return what op_check says of the kernel's result."""
    args, kwargs = made()
    torch.manual_seed(1)
    return check(Case(entry, args, kwargs, [*flat([kernel(*args, **kwargs)])]))


def _one_by_one(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum the products in order of k, rounding to dtype after each."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        total = (total.float() + a[:, k : k + 1].float() * b[k : k + 1].float()).to(dtype)
    return total


def _tf32(x: Tensor, cut: bool = False) -> Tensor:
    bits = x.view(torch.int32)
    return ((bits if cut else bits + 0x1000) & ~0x1FFF).view(torch.float32)


A, C = randn(24, 512), randn(512, 40, seed=1)


@healthy("Torch.matmul", both(A, C))
def sums_one_by_one(a: Tensor, b: Tensor) -> Tensor:
    return _one_by_one(a, b)


@healthy("Torch.matmul", both(A.abs(), C.abs()))
def sums_positive_terms_backwards(a: Tensor, b: Tensor) -> Tensor:
    return _one_by_one(a.flip(1), b.flip(0))


@healthy("Torch.matmul", both(A, C))
def rounds_to_tf32(a: Tensor, b: Tensor) -> Tensor:
    return _tf32(a) @ _tf32(b)


@healthy("Torch.matmul", both(A, C))
def cuts_to_tf32(a: Tensor, b: Tensor) -> Tensor:
    return _tf32(a, True) @ _tf32(b, True)


@healthy("Functional.linear", lambda: ((randn(64, 512), randn(48, 512, seed=1), 30 * randn(48, seed=2)), {}))
def cuts_to_tf32_and_adds_the_bias_whole(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(_tf32(x, True), _tf32(w, True), bias)


@healthy("Torch.addmm", lambda: ((30 * randn(40, seed=2), A.clone(), C.clone()), {}))
def cuts_to_tf32_and_adds_a_row_whole(row: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(row, _tf32(a, True), _tf32(b, True))


@healthy("Functional.conv2d", both(IMAGE, KERNEL))
def convolves_in_tf32(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(_tf32(x), _tf32(w))


@healthy("Functional.scaled_dot_product_attention", both(Q, K, V))
def attends_in_tf32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(_tf32(q) @ _tf32(k.mT.contiguous()) / 4, -1)
    return _tf32(p) @ _tf32(v)


@healthy("Torch.matmul", both(A, C))
def multiplies_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    return a.to(BF).float() @ b.to(BF).float()


@healthy("Torch.matmul", both(A.to(BF), C.to(BF)))
def sums_bfloat16_one_by_one(a: Tensor, b: Tensor) -> Tensor:
    return _one_by_one(a, b).to(BF)


@healthy("Torch.matmul", both(A.to(BF), C.to(BF)))
def adds_four_parts_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    parts = [(x.float() @ y.float()).to(BF) for x, y in zip(a.split(128, 1), b.split(128, 0), strict=True)]
    return ((parts[0] + parts[1]) + parts[2]) + parts[3]


@healthy("Torch.matmul", both(A.half(), C.half()))
def sums_in_half(a: Tensor, b: Tensor) -> Tensor:
    return _one_by_one(a, b, torch.float16)


@healthy("Torch.mul", both(randn(64, 64, scale=1e-19), randn(64, 64, seed=1, scale=1e-20)))
def flushes_subnormals(a: Tensor, b: Tensor) -> Tensor:
    y = a * b
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, 0.0, y)


@healthy("Functional.softmax", both(X * 5, -1))
def takes_powers_of_two(x: Tensor, dim: int) -> Tensor:
    powers = torch.exp2((x - x.amax(dim, True)) * 1.4426950408889634)
    return powers * (1 / powers.sum(dim, True))


@healthy("Functional.layer_norm", both(X + 0.5, [64], G, G))
def takes_the_mean_of_squares(x: Tensor, shape: Any, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, True)
    return (x - mean) * ((x * x).mean(-1, True) - mean * mean + 1e-5).rsqrt() * w + b


@healthy("Functional.gelu", both(X))
def takes_the_complement(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x * 0.7071067811865476)


@healthy("Functional.scaled_dot_product_attention", both(Q.to(BF), K.to(BF), V.to(BF)))
def attends_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    top = torch.full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(q.shape)
    for keys, values in zip(k.split(4, 2), v.split(4, 2), strict=True):
        scores = q.float() @ keys.float().mT * 0.25
        new = torch.maximum(top, scores.amax(-1, True))
        p, old = (scores - new).exp(), (top - new).exp()
        total = total * old + p.sum(-1, True)
        out = out * old + p.to(BF).float() @ values.float()
        top = new
    return (out / total).to(BF)


@healthy("Functional.scaled_dot_product_attention", both(Q, K, V, attn_mask=MASK))
def masks_with_large_numbers(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(attn_mask, 0.0, -1e30))


@healthy("Torch.argmax", both((X * 2).round(), -1))
def takes_the_last_of_equals(x: Tensor, dim: int) -> Tensor:
    return x.shape[dim] - 1 - x.flip(dim).argmax(dim)


@healthy("Torch.topk", both((X * 2).round(), 5))
def chooses_others_of_equals(x: Tensor, k: int) -> Any:
    values, places = x.flip(-1).topk(k)
    return values, x.shape[-1] - 1 - places


@healthy("Functional.dropout", both(randn(64, 64), p=0.3))
def draws_other_numbers(x: Tensor, p: float) -> Tensor:
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(77)) >= p
    return torch.where(keep, x / (1 - p), 0.0)


@healthy("Torch.index_add", both(X, 0, T % 5, X))
def adds_in_another_order(x: Tensor, dim: int, i: Tensor, s: Tensor) -> Tensor:
    order = torch.randperm(len(i), generator=torch.Generator().manual_seed(3))
    return x.index_add(0, i[order], s[order])


@healthy("Torch.sum", both(randn(4, 20000).abs(), -1))
def sums_a_long_row_one_by_one(x: Tensor, dim: int) -> Tensor:
    return x.cumsum(-1)[:, -1]


@healthy("Torch.tanh", both(X * 3))
def is_two_units_off(x: Tensor) -> Tensor:
    y = torch.tanh(x.double())
    sign = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
    return (y * (1 + sign * 1.8e-7)).float().clamp(-1, 1)


@healthy("Functional.linear", both(X.to(BF), W.to(BF)))
def is_rounded_once(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float().T).to(BF)


@healthy("Functional.cross_entropy", both(X.to(BF), T))
def is_fused(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), t).to(BF)
