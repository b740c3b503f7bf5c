"""The formulas of op_check against the same definitions written in NumPy float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainprobe.op_check.references import formulas

DRAWN = np.random.default_rng(0)


def drawn(*shape: int) -> Any:
    return DRAWN.standard_normal(shape)


X, W, B, G = drawn(5, 8), drawn(6, 8), drawn(6), drawn(8)
Q, K, V = drawn(2, 3, 4), drawn(2, 5, 4), drawn(2, 5, 3)
IMAGE, KERNEL = drawn(2, 4, 7, 6), drawn(6, 2, 3, 2)
LABELS = np.array([0, 3, 7, 2, -100])
ERF = np.vectorize(math.erf)


def softmax(x: Any, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def normal(x: Any, axes: Any, eps: float = 1e-5) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def convolved(x: Any, w: Any, b: Any, stride: int, pad: int, dilation: int, groups: int) -> Any:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    n, (out, per, high, wide) = x.shape[0], w.shape
    rows = (x.shape[2] - dilation * (high - 1) - 1) // stride + 1
    columns = (x.shape[3] - dilation * (wide - 1) - 1) // stride + 1
    y = np.zeros((n, out, rows, columns))
    for o in range(out):
        first = o // (out // groups) * per
        for i in range(rows):
            for j in range(columns):
                down = slice(i * stride, i * stride + dilation * (high - 1) + 1, dilation)
                right = slice(j * stride, j * stride + dilation * (wide - 1) + 1, dilation)
                y[:, o, i, j] = (x[:, first : first + per, down, right] * w[o]).sum((1, 2, 3)) + b[o]
    return y


def pooled(x: Any, k: int, stride: int, pad: int) -> Any:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    rows, columns = (x.shape[2] - k) // stride + 1, (x.shape[3] - k) // stride + 1
    cut = lambda i, j: x[:, :, i * stride : i * stride + k, j * stride : j * stride + k].mean((2, 3))  # noqa: E731
    return np.stack([np.stack([cut(i, j) for j in range(columns)], -1) for i in range(rows)], -2)


def attended(q: Any, k: Any, v: Any, causal: bool) -> Any:
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    return softmax(scores) @ v


def entropy(x: Any, t: Any, smoothing: float) -> Any:
    logs, seen = np.log(softmax(x)), t != -100
    losses = -(1 - smoothing) * logs[np.arange(len(t)), np.where(seen, t, 0)] - smoothing * logs.mean(-1)
    return losses[seen].mean()


ORACLES: list[tuple[str, tuple[Any, ...], dict[str, Any], Callable[[], Any]]] = [
    ("linear", (X, W, B), {}, lambda: X @ W.T + B),
    ("matmul", (X, W.T), {}, lambda: X @ W.T),
    ("addmm", (B, X, W.T), {"beta": 0.5, "alpha": -2}, lambda: 0.5 * B - 2 * X @ W.T),
    ("softmax", (X, 0), {}, lambda: softmax(X, 0)),
    ("log_softmax", (X, -1), {}, lambda: np.log(softmax(X))),
    ("logsumexp", (X, 1), {}, lambda: np.log(np.exp(X).sum(1))),
    ("cross_entropy", (X, LABELS), {}, lambda: entropy(X, LABELS, 0.0)),
    ("cross_entropy", (X, LABELS), {"label_smoothing": 0.1}, lambda: entropy(X, LABELS, 0.1)),
    ("layer_norm", (X, [8], G, G), {"eps": 1e-3}, lambda: normal(X, (-1,), 1e-3) * G + G),
    ("rms_norm", (X, [8], G), {"eps": 1e-6}, lambda: X / np.sqrt((X * X).mean(-1, keepdims=True) + 1e-6) * G),
    ("group_norm", (IMAGE, 2), {}, lambda: normal(IMAGE.reshape(2, 2, -1), (-1,)).reshape(IMAGE.shape)),
    ("batch_norm", (IMAGE,), {"running_mean": None, "training": True}, lambda: normal(IMAGE, (0, 2, 3))),
    ("instance_norm", (IMAGE,), {}, lambda: normal(IMAGE, (2, 3))),
    ("scaled_dot_product_attention", (Q, K, V), {}, lambda: attended(Q, K, V, False)),
    ("scaled_dot_product_attention", (Q, K, V), {"is_causal": True}, lambda: attended(Q, K, V, True)),
    ("gelu", (X,), {}, lambda: X * (1 + ERF(X / math.sqrt(2))) / 2),
    ("gelu", (X,), {"approximate": "tanh"}, lambda: X / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))),
    ("silu", (X,), {}, lambda: X / (1 + np.exp(-X))),
    ("tanh", (X,), {}, lambda: np.tanh(X)),
    ("sigmoid", (X,), {}, lambda: 1 / (1 + np.exp(-X))),
    ("relu", (X,), {}, lambda: np.maximum(X, 0)),
    ("leaky_relu", (X, 0.2), {}, lambda: np.where(X > 0, X, 0.2 * X)),
    ("elu", (X, 1.5), {}, lambda: np.where(X > 0, X, 1.5 * np.expm1(X))),
    ("softplus", (X, 2.0), {}, lambda: np.log1p(np.exp(2 * X)) / 2),
    ("logsigmoid", (X,), {}, lambda: -np.log1p(np.exp(-X))),
    ("hardswish", (X,), {}, lambda: X * np.clip(X + 3, 0, 6) / 6),
    ("mish", (X,), {}, lambda: X * np.tanh(np.log1p(np.exp(X)))),
    ("glu", (X,), {}, lambda: X[:, :4] / (1 + np.exp(-X[:, 4:]))),
    ("embedding", (np.array([[1, 4], [2, 2]]), X), {}, lambda: X[np.array([[1, 4], [2, 2]])]),
    ("conv2d", (IMAGE, KERNEL, B, 2, 1, 2, 2), {}, lambda: convolved(IMAGE, KERNEL, B, 2, 1, 2, 2)),
    ("avg_pool2d", (IMAGE, 3, 2, 1), {}, lambda: pooled(IMAGE, 3, 2, 1)),
]


def as_torch(x: Any) -> Any:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(("name", "args", "kwargs", "oracle"), ORACLES, ids=[f"{o[0]} {i}" for i, o in enumerate(ORACLES)])
def test_a_formula_is_the_definition(name: str, args: Any, kwargs: Any, oracle: Callable[[], Any]) -> None:
    got = formulas()[name].compute(*map(as_torch, args), **{key: as_torch(value) for key, value in kwargs.items()})
    want = np.asarray(oracle())
    assert tuple(got.shape) == want.shape
    assert float(np.abs(got.numpy() - want).max()) <= 1e-13 * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "tanh", "sigmoid"])
def test_a_slope_that_is_written_out_is_the_slope(name: str) -> None:
    x = torch.from_numpy(X[:3]).requires_grad_()
    call = formulas()[name].compute
    assert torch.autograd.gradcheck(lambda t: call(t, -1) if "softmax" in name else call(t), (x,))


def test_a_row_that_sees_nothing_is_zero_and_nan_stays_nan() -> None:
    attention = formulas()["scaled_dot_product_attention"].compute
    blind = attention(*map(as_torch, (Q, K, V)), attn_mask=torch.zeros(3, 5, dtype=torch.bool))
    assert not blind.any()
    assert formulas()["relu"].compute(torch.tensor([math.nan])).isnan().all()


def test_the_row_of_padding_has_no_gradient() -> None:
    weight = torch.from_numpy(X).clone().requires_grad_()
    formulas()["embedding"].compute(torch.tensor([1, 2, 1]), weight, 1).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum(1).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize(
    ("dims", "settings"),
    [
        (1, {"stride": 2, "padding": 1, "output_padding": 1}),
        (2, {"stride": (2, 3), "padding": (1, 0), "dilation": (1, 2), "groups": 2}),
        (3, {"stride": 1, "padding": 1}),
    ],
)
def test_transposed_convolutions_are_the_adjoint_of_convolutions(dims: int, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[5] * dims, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, *[3] * dims, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3 * settings.get("groups", 1), dtype=torch.float64)
    name = f"conv_transpose{dims}d"
    ours, theirs = formulas()[name].compute(x, w, b, **settings), getattr(torch.nn.functional, name)(x, w, b, **settings)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(theirs)
    for mine, torchs in zip(torch.autograd.grad(ours, [x, w], g), torch.autograd.grad(theirs, [x, w], g), strict=True):
        assert torch.allclose(mine, torchs, rtol=1e-12, atol=1e-12)
