"""Attention, per head: the entropy of its rows, the largest logit, and how peaked it is.

    entropy         mean over rows of -Σ_j p_j ln p_j, p = softmax of a row of logits (nats)
    largest logit   max over rows and keys of q·k·scale + mask, before the softmax
    peak            mean over rows of max_j p_j

(Zhai et al., *Stabilizing Transformer Training by Preventing Attention Entropy Collapse*, 2023; the largest logit is what
Dehghani et al., *Scaling Vision Transformers to 22 Billion Parameters*, 2023, watch.)

They are worked out again from what goes into `scaled_dot_product_attention`, or from the logits that go into a softmax over the
last of four dimensions [batch, heads, queries, keys] (of three in `torch.nn.MultiheadAttention`), in float32 (float64 for
float64). Of long sequences and large batches evenly spaced ones are looked at. Rows in which everything is masked
are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, whole, without_autograd
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.tape import Tape

_UNSEEN = (
    "attention features were asked for and no attention was seen: fused kernels outside torch (flash_attn, Transformer Engine) "
    "and compiled regions hide it; switch to torch's scaled_dot_product_attention, or to an eager softmax, to see it"
)


class AttentionFeature(QuietFeature):
    """See the module text.

    rows: how many queries of a sequence, and sequences: how many of a batch are looked at.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        every: int = 1,
        rows: int = 64,
        sequences: int = 4,
    ) -> None:
        super().__init__(around, every=every)
        self._guard = around.guard
        self._inside = around.inside
        self._rows = rows
        self._sequences = sequences
        self._replaced: list[Replaced] = []
        self._within = False
        self._seen = False
        attend, softmax = functional.scaled_dot_product_attention, functional.softmax
        self._ours = [
            (functional, "scaled_dot_product_attention", self._watched(attend, self._attend)),
            (functional, "softmax", self._watched(softmax, self._softmax)),
            (torch, "softmax", self._watched(torch.softmax, self._softmax)),
            (torch.Tensor, "softmax", self._watched(torch.Tensor.softmax, self._softmax)),
        ]

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """Listen to a step."""
        super().begin(tape, models)
        self._seen = False

    def sleep(self, asleep: bool) -> None:
        """Take the functions away, or put them in place."""
        if asleep:
            for replaced in reversed(self._replaced):
                replaced.back()
            self._replaced.clear()
        elif not self._replaced:
            self._replaced = [Replaced(owner, name, ours, traced=True) for owner, name, ours in self._ours]

    def end(self) -> None:
        """Put everything back; say it when nothing was seen."""
        self.sleep(True)
        if not self._seen:
            self.notes[_UNSEEN] = None
        super().end()

    def _watched(self, original: Any, look: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            below = function.below  # type: ignore[attr-defined]
            call = below if callable(below) else original  # a method that torch.Tensor inherits has nothing below
            if function.ended or self._within or not self._inside or torch.compiler.is_compiling():  # type: ignore[attr-defined]
                return call(*args, **kwargs)
            name, module = self._inside[-1]
            if not self._chosen(name):
                return call(*args, **kwargs)
            self._within = True
            try:
                self._guard.run(self._look, look, name, module, args, kwargs)
                return call(*args, **kwargs)
            finally:
                self._within = False

        return function

    def _look(self, look: Callable[..., None], name: str, module: Any, args: Any, kwargs: Any) -> None:
        if self._tape is not None:
            with without_autograd():
                look(name, module, *args, **kwargs)

    def _attend(
        self,
        name: str,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.dim() < 3 or not whole(query) or not whole(key):
            return
        logits = attention_logits(
            query, key, attn_mask, causal=is_causal, scale=scale, rows=self._rows, sequences=self._sequences
        )
        self._record(name, logits)

    def _softmax(
        self, name: str, module: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **kwargs: Any
    ) -> None:
        if isinstance(module, torch.nn.MultiheadAttention) and input.dim() == 3 and input.shape[0] % module.num_heads == 0:
            input, dim = input.unflatten(0, (-1, module.num_heads)), 3 if dim == 2 else dim
        if not whole(input) or input.dim() != 4 or dim not in (-1, 3) or not input.is_floating_point():
            return
        self._record(name, sampled(input, self._rows, self._sequences))

    def _record(self, name: str, logits: Tensor) -> None:
        assert self._tape is not None
        self._seen = True
        for slot, numbers in zip(("attention_entropy", "attention_logit", "attention_peak"), of_logits(logits), strict=True):
            self._tape.feature(name, slot, numbers)


def spread(length: int, most: int, device: Any) -> Tensor | None:
    """Return up to `most` evenly spaced places of `length`, the last one among them; None for all."""
    if length <= most:
        return None
    return torch.tensor([(i + 1) * length // most - 1 for i in range(most)]).to(device, non_blocking=True)


def sampled(x: Tensor, rows: int, sequences: int) -> Tensor:
    """Return the sequences (dimension -4) and rows (dimension -2) of a tensor that are looked at, in float32 or float64."""
    x = x.detach()
    for dim, most in ((-4, sequences), (-2, rows)):
        places = spread(x.shape[dim], most, x.device) if x.dim() >= -dim else None
        x = x if places is None else x.index_select(dim, places)
    return x if x.dtype == torch.float64 else x.float()


def attention_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    rows: int,
    sequences: int,
) -> Tensor:
    """Return the logits [batch, heads, rows, keys] of `scaled_dot_product_attention`, -inf where it masks.

    query: float [batch, heads, queries, size] (or without batch). key: [batch, heads or a divisor of them, keys, size].
    """
    length, keys = query.shape[-2], key.shape[-2]
    places = spread(length, rows, query.device)
    q = sampled(query, rows, sequences)
    k = sampled(key, key.shape[-2], sequences)
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        at = torch.arange(length, device=q.device) if places is None else places
        logits = logits.masked_fill(torch.arange(keys, device=q.device) > at[:, None], -torch.inf)
    if mask is not None:
        few = mask.detach()
        for dim, size, most in ((-4, query.shape[-4] if query.dim() > 3 else 1, sequences), (-2, length, rows)):
            chosen = spread(size, most, few.device)
            if few.dim() >= -dim and few.shape[dim] == size and chosen is not None:
                few = few.index_select(dim, chosen)
        logits = logits.masked_fill(~few, -torch.inf) if few.dtype == torch.bool else logits + few.to(logits.dtype)
    return logits


def of_logits(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (entropy, largest logit, peak), each [heads], of logits [batch, heads, rows, keys] (or without batch)."""
    largest = logits.amax(-1)
    there = largest != -torch.inf
    logp = torch.log_softmax(logits, -1)
    entropy = -torch.where(logp > -torch.inf, logp.exp() * logp, 0.0).sum(-1)
    entropy = torch.where(logp.isnan().any(-1), torch.nan, entropy)
    peak = logp.amax(-1).exp()
    other = [d for d in range(largest.dim()) if d != largest.dim() - 2]
    count = there.sum(other)
    means = [torch.where(there, x, 0.0).sum(other) / count for x in (entropy, peak)]
    return means[0], torch.where(there, largest, -torch.inf).amax(other), means[1]
