"""Routers of mixtures of experts: how the load is spread, how sure the router is, and how similar its experts' rows are.

    load         share of all (token, expert) assignments that each expert gets, [experts]
    entropy      mean over tokens of -Σ_e p_e ln p_e (nats), p = softmax of the logits x·Wᵀ (+ bias), or sigmoid over its sum
                 where the router says so
    similarity   mean over pairs i < j of cos(w_i, w_j), w_i the rows of W (as mindstudio-probe's monitor has it)

A router is a module with a weight [experts, width] whose input ends in `width`: a linear gate, Hugging Face's routers,
Megatron's TopKRouter. The logits are worked out again in float32 from what the router is called with. Assignments come from
its output: a boolean map [tokens, experts] or whole numbers [tokens, k]; otherwise they are the k largest logits, k being what
the router or the module around it calls top_k, topk, k or num_experts_per_tok.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainprobe.engine.arrays.torch_extras import tally
from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, tensors_of, whole
from trainprobe.engine.tape import Tape

_CHOICES = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk", "k")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RouterFeature(QuietFeature):
    """See the module text. top_k: how many experts a token gets, where neither output nor module tells it."""

    def __init__(self, around: Surroundings, *, every: int = 1, top_k: int | None = None) -> None:
        super().__init__(around, every=every)
        self._inside = around.inside
        self._top_k = top_k
        self._routers: list[tuple[str, Any]] = []

    def wants(self, name: str, module: Any) -> bool:
        """Look at chosen modules with a weight [experts, width], experts < width."""
        weight = _held(module, "weight")
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not 1 < weight.shape[0] < weight.shape[1]:
            return False
        is_chosen = self._chosen(name)
        if is_chosen and all(module is not known for _, known in self._routers):
            self._routers.append((name, module))
        return is_chosen

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """Look at the routers' weights as they are when the step begins."""
        super().begin(tape, models)
        for name, module in self._routers:
            weight = _held(module, "weight")
            if whole(weight):
                tape.feature(name, "router_similarity", similarity(weight))

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Work out the logits of the tokens that come in, [tokens, experts]."""
        weight = _held(module, "weight")
        x = next((t for t in tensors_of((args, kwargs)) if t.shape[-1:] == weight.shape[1:] and t.is_floating_point()), None)
        if x is None or not whole(x) or not whole(weight):
            return None
        bias = _held(module, "bias")
        bias = bias.detach().float() if isinstance(bias, Tensor) and bias.shape == weight.shape[:1] else None
        return functional.linear(x.detach().reshape(-1, weight.shape[1]).float(), weight.detach().float(), bias)

    def after(self, name: str, module: Any, before: Any, out: Any) -> None:
        """Tell the load and the entropy."""
        logits = before
        if logits is None or self._tape is None or logits.shape[0] == 0:
            return
        around = self._inside[-2][1] if len(self._inside) > 1 else None
        p = _probabilities(logits, module)
        self._tape.feature(name, "router_entropy", -torch.special.xlogy(p, p).sum(-1).mean())
        counts = chosen(tensors_of(out), logits.shape[1])
        if counts is None:
            k = self._top_k or _choices_of(module) or _choices_of(around)
            if k is None:
                self.notes[
                    f"{name} does not say how many experts a token gets: its load counts each token's first choice; "
                    "give monitor.features.routers.top_k"
                ] = None
            best = logits.topk(min(k or 1, logits.shape[1]), -1).indices
            counts = _tally(best, logits.shape[1])
        counts = counts.double() if counts.device.type != "mps" else counts.float()
        self._tape.feature(name, "router_load", counts / counts.sum())


def _held(module: Any, name: str) -> Any:
    """Return what a module holds; a parametrization works its tensor out when it is asked, and spectral norm moves by that."""
    registered = module._parameters.get(name)
    return vars(module).get(name) if registered is None else registered


def similarity(weight: Tensor) -> Tensor:
    """Return the mean cosine of pairs of rows of float [experts, width]."""
    rows = functional.normalize(weight.detach().float(), dim=1)
    total = rows.sum(0).square().sum() - rows.square().sum()
    return total / (rows.shape[0] * (rows.shape[0] - 1))


def chosen(outputs: Sequence[Tensor], experts: int) -> Tensor | None:
    """Return how many tokens each expert gets, [experts], by a boolean map or by whole numbers; None where neither is there."""
    for t in outputs:
        if t.dtype == torch.bool and t.shape[-1:] == (experts,):
            return t.detach().reshape(-1, experts).sum(0)
    for t in outputs:
        if t.dtype in _INTEGERS and t.dim() >= 2 and t.shape[-1] <= experts:
            return _tally(t.detach(), experts)
    return None


def _tally(places: Tensor, experts: int) -> Tensor:
    flat = places.reshape(-1).long()
    inside = (flat >= 0) & (flat < experts)  # a dropped token may be marked by a number that is no expert
    at = torch.where(inside, flat, experts)
    return tally(at, experts + 1)[:experts]


def _probabilities(logits: Tensor, module: Any) -> Tensor:
    places = (module, getattr(module, "config", None))
    score_functions = [
        getattr(place, name, None)
        for place in places
        for name in ("score_function", "scoring_func", "moe_router_score_function")
    ]
    if "sigmoid" in score_functions:
        p = logits.sigmoid()
        return p / p.sum(-1, keepdim=True)
    return logits.softmax(-1)


def _choices_of(module: Any) -> int | None:
    for place in (module, getattr(module, "config", None)):
        for name in _CHOICES:
            number = getattr(place, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None
