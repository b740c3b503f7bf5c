"""Formulas of the NPU's fused operators against what torch composes, and the mistakes that are known of their references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trainprobe.op_check.cases import Case, flat
from trainprobe.op_check.check import check

torch.manual_seed(0)
X, G, B = torch.randn(6, 10, 16), torch.randn(16), torch.randn(16)
IMAGE, WIDE, NARROW = torch.randn(2, 8, 5, 3), torch.randn(8), torch.randn(8)
COS, SIN = torch.rand(1, 10, 16), torch.rand(1, 10, 16)
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
MASK = torch.rand(5, 7) < 0.4
MASK[:, 0] = False
SCALE = 1 / math.sqrt(8)
PSE = torch.randn(2, 4, 5, 7)


def rms_norm(x: Any, g: Any, eps: float = 1e-6) -> Any:
    return F.rms_norm(x, g.shape, g, eps), (x.square().mean([*range(-g.ndim, 0)], True) + eps).rsqrt()


def attention(q: Any, k: Any, v: Any, scale: float = SCALE, seen: Any = None, pse: Any = None) -> Any:
    """torch's own, with k and v repeated for the heads that share them, and `pse` added to the scaled products."""
    bias = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    bias = bias if seen is None else bias.masked_fill(~seen, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, bias if pse is None else bias + pse, scale=scale, enable_gqa=True)


def heads_last(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def turned(x: Any) -> Any:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def halves(x: Any) -> Any:
    return torch.cat([-x[..., 8:], x[..., :8]], -1)


SMALL = torch.full((4, 16), 1e-3)
ROWS = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 4.0, -1.0, 2.0], [1.0, -2.0, 0.0, 5.0]])
FINISHED = torch.tensor([False, True, False])
ROW, J = torch.arange(5).unsqueeze(-1), torch.arange(7)
STRIDE: dict[str, Any] = {"head_num": 4, "input_layout": "BNSD", "scale": SCALE}

# name, arguments, keywords, what is right, what is wrong
RIGHT: list[tuple[str, tuple[Any, ...], dict[str, Any], Any, Any]] = [
    ("npu_rms_norm", (X, G), {}, rms_norm(X, G), None),
    ("npu_rms_norm", (X, G.expand(10, 16)), {}, rms_norm(X, G.expand(10, 16)), rms_norm(X, G)),  # the last axis only
    ("npu_rms_norm", (SMALL, G), {}, rms_norm(SMALL, G), rms_norm(SMALL, G, 1e-5)),  # the default of the reference
    ("npu_swiglu", (X,), {}, F.silu(X[..., :8]) * X[..., 8:], F.silu(X[..., 8:]) * X[..., :8]),
    ("npu_swiglu", (X,), {"dim": 1}, F.silu(X[:, :5]) * X[:, 5:], F.silu(X[:, :5]).half().float() * X[:, 5:]),
    ("npu_rotary_mul", (X, COS, SIN), {}, COS * X + SIN * halves(X), COS * X + SIN * turned(X)),
    ("npu_rotary_mul", (X, COS, SIN, "interleave"), {}, COS * X + SIN * turned(X), COS * X + SIN * halves(X)),
    (
        "npu_scaled_masked_softmax",
        (PSE, MASK, 2.0),
        {},
        F.softmax((2 * PSE).masked_fill(MASK, -10000.0), -1),
        F.softmax(PSE.masked_fill(MASK, -10000.0), -1),
    ),
    (
        "npu_scaled_masked_softmax",
        (PSE, MASK, 1.0, True),
        {},
        F.softmax(PSE.masked_fill(J > ROW, -10000.0), -1),
        F.softmax(PSE.masked_fill(MASK, -10000.0), -1),
    ),
    ("fast_gelu", (X,), {}, X * torch.sigmoid(1.702 * X), F.gelu(X)),
    ("npu_fast_gelu", (X,), {}, X * torch.sigmoid(1.702 * X), F.gelu(X, approximate="tanh")),
    ("npu_mish", (X,), {}, F.mish(X), F.silu(X)),
    ("npu_layer_norm_eval", (X, [16], G, B, 1e-2), {}, F.layer_norm(X, [16], G, B, 1e-2), F.layer_norm(X, [16])),
    ("npu_linear", (X[0], torch.eye(16)[:5], B[:5]), {}, X[0, :, :5] + B[:5], X[0, :, :5]),
    (
        "npu_group_norm_silu",
        (IMAGE, WIDE, NARROW, 2),
        {},
        (
            F.silu(F.group_norm(IMAGE, 2, WIDE, NARROW)),
            IMAGE.reshape(2, 2, -1).mean(-1),
            (IMAGE.reshape(2, 2, -1).var(-1, correction=0) + 1e-5).rsqrt(),
        ),
        (F.silu(F.group_norm(IMAGE, 2)), IMAGE.reshape(2, 2, -1).mean(-1), IMAGE.reshape(2, 2, -1).std(-1).reciprocal()),
    ),
    (
        "npu_confusion_transpose",
        (IMAGE, [0, 2, 1, 3], [2, 5, 24], True),
        {},
        IMAGE.permute(0, 2, 1, 3).reshape(2, 5, 24),
        IMAGE.reshape(2, 5, 24),
    ),
    ("npu_confusion_transpose", (IMAGE, [1, 0], [2, 120], False), {}, IMAGE.reshape(2, 120).T, IMAGE.reshape(120, 2)),
    ("npu_sort_v2", (X, 1, True), {}, X.sort(1, True).values, X.sort(1).values),
    (
        "npu_moe_gating_top_k_softmax",
        (ROWS, FINISHED, 2),
        {},
        (ROWS.softmax(-1).topk(2).values, torch.tensor([[0, 2], [4, 4], [3, 0]]), torch.tensor([[0, 3], [1, 4], [2, 5]])),
        (ROWS.softmax(-1).topk(2).values, ROWS.topk(2).indices, torch.tensor([[0, 1], [2, 3], [4, 5]])),
    ),
    ("npu_fusion_attention", (Q, K, V), STRIDE, attention(Q, K, V), attention(Q, K, V, 1.0)),
    ("npu_fusion_attention", (Q, K, V, 4, "BNSD"), {}, attention(Q, K, V, 1.0), attention(Q, K, V)),  # the schema's scale
    (
        "npu_fusion_attention",
        (*map(heads_last, (Q, K, V)), 4, "BSH"),
        {"scale": SCALE, "atten_mask": MASK},
        heads_last(attention(Q, K, V, seen=~MASK)),
        heads_last(attention(Q, K, V, seen=MASK | (J == 0))),
    ),
    (
        "npu_fusion_attention",
        (*(heads_last(x).transpose(0, 1) for x in (Q, K, V)), 4, "SBH"),
        {"scale": SCALE, "pse": PSE},
        heads_last(attention(Q, K, V, pse=PSE * SCALE)).transpose(0, 1),
        heads_last(attention(Q, K, V, pse=PSE)).transpose(0, 1),
    ),
    (
        "npu_fusion_attention_v2",
        (*(x.transpose(1, 2) for x in (Q, K, V)), 4, "BSND"),
        {"scale": SCALE, "pse": PSE, "pse_type": 0},
        attention(Q, K, V, pse=PSE).transpose(1, 2),
        attention(Q, K, V, pse=PSE * SCALE).transpose(1, 2),
    ),
    (
        "npu_fusion_attention",
        (Q, K, V),
        {**STRIDE, "sparse_mode": 2, "atten_mask": MASK},
        attention(Q, K, V, seen=J <= ROW),
        attention(Q, K, V, seen=J <= ROW + 2),
    ),
    (
        "npu_fusion_attention",
        (Q, K, V),
        {**STRIDE, "sparse_mode": 3, "atten_mask": MASK},
        attention(Q, K, V, seen=J <= ROW + 2),
        attention(Q, K, V, seen=J <= ROW),
    ),
    (
        "npu_fusion_attention",
        (Q, K, V),
        {**STRIDE, "sparse_mode": 4, "pre_tockens": 1, "next_tockens": 0, "atten_mask": MASK},
        attention(Q, K, V, seen=(J - 2 <= ROW) & (J - 2 >= ROW - 1)),
        attention(Q, K, V, seen=(J <= ROW) & (J >= ROW - 1)),
    ),
    (
        "npu_fusion_attention",
        (*(x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V)), 4, "TND"),
        {"scale": SCALE, "actual_seq_qlen": [5, 10], "actual_seq_kvlen": [7, 14]},
        attention(Q, K, V).transpose(1, 2).flatten(0, 1),
        attention(Q, K.flip(0), V.flip(0)).transpose(1, 2).flatten(0, 1),
    ),
]


def judged(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str:
    return check(Case(f"NPU.{name}", args, kwargs, [*flat(out)])).worst.outcome


@pytest.mark.parametrize(("name", "args", "kwargs", "right", "wrong"), RIGHT, ids=[f"{r[0]}{i}" for i, r in enumerate(RIGHT)])
def test_the_definition_is_kept(name: str, args: Any, kwargs: Any, right: Any, wrong: Any) -> None:
    assert judged(name, args, kwargs, right) in ("exact", "rounding")
    assert wrong is None or judged(name, args, kwargs, wrong) == "bug"


@pytest.mark.parametrize(
    ("name", "args", "composed"),
    [
        ("npu_rms_norm", (X, G), lambda x, g: F.rms_norm(x, (16,), g, 1e-6)),
        ("npu_swiglu", (X,), lambda x: F.silu(x[..., :8]) * x[..., 8:]),
        ("npu_rotary_mul", (X, COS.expand(6, 10, 16), SIN.expand(6, 10, 16)), lambda x, c, s: c * x + s * halves(x)),
        ("fast_gelu", (X,), lambda x: x * torch.sigmoid(1.702 * x)),
        ("npu_mish", (X,), F.mish),
    ],
)
def test_gradients_are_those_of_the_arguments_in_order(name: str, args: Any, composed: Callable[..., Any]) -> None:
    leaves = [x.clone().requires_grad_() for x in args]
    out = composed(*leaves)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, g)
    case = Case(f"NPU.{name}", args, {}, [out.detach()], [g], list(found))
    assert check(case, backward=True).worst.outcome in ("exact", "rounding")
    case.results = [found[0] * 1.001, *found[1:]]
    assert check(case, backward=True).worst.outcome in ("bug", "suspicious")


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_and_adamw_are_those_of_torch(decay: float, amsgrad: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=decay, amsgrad=amsgrad, foreach=False)
    weight.grad = torch.randn(50)
    optimizer.step()
    state = optimizer.state[weight]
    before = [t.clone() for t in (weight.detach(), state["exp_avg"], state["exp_avg_sq"])]
    most = state["max_exp_avg_sq"].clone() if amsgrad else None
    weight.grad = torch.randn(50)
    optimizer.step()
    after = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
    powers = (0.9, 0.999, 0.01, decay, 0.9, 0.999, 1e-8, weight.grad, most, amsgrad, False)
    assert judged("npu_apply_adam_w", powers, {"out": before}, after) in ("exact", "rounding")
    assert judged("npu_apply_adam_w", (0.81, 0.998001, *powers[2:]), {"out": before}, after) == "bug", "of the step before"
    if not decay and not amsgrad:  # the other operator adds ε to √v and not to √v̂
        given = (0.81, 0.998001, 0.01, 0.9, 0.999, 0.0, weight.grad, False, False)
        plain = [before[0] - 0.01 * (after[1] / 0.19) / (after[2] / 0.001999).sqrt(), *after[1:]]
        assert judged("npu_apply_adam", given, {"out": before}, plain) in ("exact", "rounding")
        assert judged("npu_apply_adam", (*given[:-1], True), {"out": before}, plain) == "bug"


def test_what_has_no_single_answer_is_not_checked() -> None:
    def why(name: str, args: tuple[Any, ...], **kwargs: Any) -> str:
        worst = check(Case(f"NPU.{name}", args, kwargs, [Q])).worst
        assert worst.outcome == "not checked"
        return worst.reason

    assert "dropout" in why("npu_fusion_attention", (Q, K, V, 4, "BNSD"), keep_prob=0.9)
    assert "sees nothing" in why("npu_fusion_attention", (Q, K, V, 4, "BNSD"), atten_mask=torch.ones(5, 7, dtype=torch.bool))
    assert "sparse_mode=5" in why("npu_fusion_attention", (Q, K, V, 4, "BNSD"), sparse_mode=5)
    assert "so near" in why("npu_moe_gating_top_k_softmax", (torch.ones(2, 4), None, 2))
    assert "there is no NPU.npu_unheard_of" in why("npu_unheard_of", (Q,))


def test_the_other_results_of_attention_are_said_not_to_be_judged() -> None:
    out = [attention(Q, K, V), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), torch.zeros(0)]
    found = check(Case("NPU.npu_fusion_attention", (Q, K, V), STRIDE, out))
    assert found.worst.outcome in ("exact", "rounding")
    assert found.note == "its other 3 results are not judged"
