"""`npu_fusion_attention`: attention in five layouts, with the masks of its sparse modes. Checked against torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainprobe.op_check.cases import NotChecked
from trainprobe.op_check.noise import stored
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, arange, cat, matmul
from trainprobe.op_check.references.softmax import softmax

_ALL = 2147483647
Layout = tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]
# layout → (to [batch, heads, length, size of a head] with so many heads, and back)
_LAYOUTS: dict[str, Layout] = {
    "BNSD": (lambda x, n: x, lambda y: y),
    "BSND": (lambda x, n: x.transpose(1, 2), lambda y: y.transpose(1, 2)),
    "BSH": (lambda x, n: x.unflatten(-1, (n, -1)).transpose(1, 2), lambda y: y.transpose(1, 2).flatten(2)),
    "SBH": (lambda x, n: x.unflatten(-1, (n, -1)).permute(1, 2, 0, 3), lambda y: y.permute(2, 0, 1, 3).flatten(2)),
}


@formula("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3", results=1)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ALL,
    next_tockens: int = _ALL,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: Any = 0,
    offset: Any = 0,
    pse_type: int = 1,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    **further: Any,
) -> Tensor:
    """softmax(mask(s · (Q Kᵀ + pse))) V; a true element of the mask is not seen. Only the first result is judged.

    pse_type 0 adds `pse` after the scaling. Raises NotChecked with dropout, prefixes, ALiBi, sinks, a second pair of
    queries and keys, and for a row that sees nothing, of which kernels make different things.
    """
    odd = [name for name, given in {"prefix": prefix, "sink": sink, **further}.items() if given is not None]
    if keep_prob != 1.0 or odd or sparse_mode not in range(5) or pse_type not in (0, 1):
        what = "dropout" if keep_prob != 1.0 else ", ".join(odd) or f"sparse_mode={sparse_mode}, pse_type={pse_type}"
        raise NotChecked(f"npu_fusion_attention with {what} has no formula")
    band = (pre_tockens if pre_tokens is None else pre_tokens, next_tockens if next_tokens is None else next_tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, pse, _hidden(q.shape[-2], k.shape[-2], atten_mask, sparse_mode, band), scale, pse_type)

    if input_layout == "TND":
        if pse is not None:
            raise NotChecked("npu_fusion_attention with pse in layout TND has no formula")
        return _packed(attend, query, key, value, actual_seq_qlen, actual_seq_kvlen)
    if input_layout not in _LAYOUTS:
        raise NotChecked(f"npu_fusion_attention in layout {input_layout!r} has no formula")
    enter, leave = _LAYOUTS[input_layout]
    size = query.shape[-1] // head_num if input_layout in ("BSH", "SBH") else query.shape[-1]
    heads = key.shape[-1] // size  # of BSH and SBH
    return leave(attend(enter(query, head_num), enter(key, heads), enter(value, heads)))


def _packed(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], kv_ends: Sequence[int]
) -> Tensor:
    """Attend within each of several sequences that follow each other. ends: where each ends."""
    found: list[Tensor] = []
    first = kv_first = 0
    for last, kv_last in zip((int(e) for e in ends), (int(e) for e in kv_ends), strict=True):
        q, k, v = query[first:last], key[kv_first:kv_last], value[kv_first:kv_last]
        found.append(attend(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))[0].transpose(0, 1))
        first, kv_first = last, kv_last
    return cat(found, 0)


def _hidden(rows: int, columns: int, mask: Tensor | None, mode: int, band: tuple[int, int]) -> Tensor | None:
    """Return what is not seen, [rows, columns] or what the mask has; None where all is seen."""
    before, after = band
    ahead = arange(columns) - arange(rows).unsqueeze(-1)  # how far a key lies behind the query's own place
    if mode == 2:
        return ahead > 0
    if mode == 3:
        return ahead > columns - rows
    if mode == 4:
        ahead = ahead - (columns - rows)
        return (ahead > after) | (-ahead > before)
    limited = before < rows or after < columns
    if mask is not None and limited and mode == 0:
        raise NotChecked("npu_fusion_attention with a mask and a band at once has no formula")
    if mask is None:
        return (ahead > after) | (-ahead > before) if limited and mode == 0 else None
    return mask.bool()


def _attention(
    q: Tensor, k: Tensor, v: Tensor, pse: Tensor | None, hidden: Tensor | None, scale: float, pse_type: int
) -> Tensor:
    """Attend, [batch, heads, length, size]; several heads of q may share one of k and v."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = stored(matmul(q, k.mT))
    if pse is not None and pse_type == 1:
        scores = scores + pse
    scores = stored(scores * scale)
    if pse is not None and pse_type == 0:
        scores = scores + pse
    if hidden is not None:
        if bool(hidden.all(-1).any()):
            raise NotChecked("a row of npu_fusion_attention sees nothing, of which kernels make different things")
        scores = scores.masked_fill(hidden, float("-inf"))
    return matmul(stored(softmax(scores, -1)), v)
