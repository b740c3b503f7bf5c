"""What a wrong result looks like: a guess in a few words, each tried against the result itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trainprobe.op_check.cases import Case, NotChecked, Tensor
from trainprobe.op_check.evaluate import expect
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement, judge

_INT32 = 2**31
_THREADS = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 1 << 16  # to be added one after the other


def likely(case: Case, index: int, y: Tensor, found: Judgement, backward: bool) -> str:
    """Return a guess at the cause of a bug, an empty string where there is none. index: which of the results y is."""
    for text, other in _as_if(case):
        try:
            expected = expect(other, backward=backward).results[index]
        except (NotChecked, RuntimeError, TypeError, ValueError, IndexError):
            continue
        if expected is not None and judge(y, expected).outcome in ("exact", "rounding"):
            return f"it is what comes out {text}"
    threads = threads_that_kept_sums_in_16_bits(case, y) if backward else 0
    if threads:
        by = "" if threads == 1 else f" by each of {threads} threads"
        low = str(_given(case).dtype).removeprefix("torch.")
        return f"it is, to the bit, the sum of all rows kept in {low}, row by row{by}"
    if found.got == 0.0 and found.want != 0.0 and "last" in found.reason and y.numel() > _INT32:
        return "offsets of 32 bits do not reach the end of a tensor this large"
    if math.isfinite(found.gain) and abs(found.gain) > 1e-3 and found.share > 0.5:
        for factor, words in ((1.0, "twice"), (-0.5, "half"), (-1.0, "none of"), (-2.0, "minus")):
            if abs(found.gain - factor) < 1e-3:
                return f"it is {words} what it should be"
    return ""


def _given(case: Case) -> Tensor:
    return next(g for g in case.gradients or () if g is not None)


def threads_that_kept_sums_in_16_bits(case: Case, y: Tensor) -> int:
    """Return how many threads give a norm's bias gradient bit by bit, each rounding every step of its sum; 0 where none do."""
    gradients = [g for g in case.gradients or () if g is not None]
    if api(case.name) not in ("layer_norm", "native_layer_norm") or y.ndim != 1 or not gradients:
        return 0
    if gradients[0].dtype not in (torch.bfloat16, torch.float16) or gradients[0].shape[-1:] != y.shape:
        return 0
    rows = gradients[0].reshape(-1, len(y))
    if len(rows) > _MOST_ROWS:
        return 0
    for threads in _THREADS:
        total = torch.zeros(threads, len(y), dtype=rows.dtype)
        each = len(rows) // threads
        for i in range(each if each * threads == len(rows) else 0):
            total = total + rows[i::each]
        if torch.equal(total.to(torch.float32).sum(0).to(y.dtype), y):
            return threads
    return 0


_Others = Iterator[tuple[str, Case]]


def _as_if(case: Case) -> _Others:
    """Yield the same call with one argument changed, and how to say so."""
    make = _CHANGED.get(api(case.name))
    if make is not None:
        yield from make(case)


def _gelu(case: Case) -> _Others:
    other = "none" if case.kwargs.get("approximate", "none") == "tanh" else "tanh"
    yield f"with approximate={other!r}", _with(case, approximate=other)


def _average(case: Case) -> _Others:
    if len(case.args) < 6:
        other = not case.kwargs.get("count_include_pad", True)
        yield "where the padding is counted the other way", _with(case, count_include_pad=other)


def _embedding(case: Case) -> _Others:
    if case.kwargs.get("padding_idx") is not None:
        yield "without padding_idx", _with(case, padding_idx=None)


def _attention(case: Case) -> _Others:
    if case.kwargs.get("is_causal"):
        yield "without the causal mask", _with(case, is_causal=False)
    mask = case.kwargs.get("attn_mask")
    if mask is not None:
        yield "without the mask", _with(case, attn_mask=None)
        if str(mask.dtype) == "torch.bool":
            yield "where the mask's True means hidden, not seen", _with(case, attn_mask=~mask)
    yield "with a scale of 1", _with(case, scale=1.0)


def _norm(case: Case) -> _Others:
    for short in ("weight", "bias"):
        if case.kwargs.get(short) is not None:
            yield f"without the {short}", _with(case, **{short: None})
    yield "with eps = 0", _with(case, eps=0.0)


def _linear(case: Case) -> _Others:
    if case.kwargs.get("bias") is not None:
        yield "without the bias", _with(case, bias=None)
    elif len(case.args) > 2 and isinstance(case.args[2], Tensor):
        yield "without the bias", replace(case, args=(*case.args[:2], None, *case.args[3:]))


def _cross_entropy(case: Case) -> _Others:
    if case.kwargs.get("label_smoothing"):
        yield "without label smoothing", _with(case, label_smoothing=0.0)
    if case.kwargs.get("weight") is not None:
        yield "without the classes' weights", _with(case, weight=None)
    for other in {"mean", "sum"} - {case.kwargs.get("reduction", "mean")}:
        yield f"with reduction={other!r}", _with(case, reduction=other)


_CHANGED: dict[str, Callable[[Case], _Others]] = {
    "gelu": _gelu,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _average),
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm", "rms_norm"), _norm),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _linear),
}


def _with(case: Case, **changed: Any) -> Case:
    return replace(case, kwargs={**case.kwargs, **changed})
