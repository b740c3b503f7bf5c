"""The order in which Megatron's models hold their parameters, which the buffers of its distributed optimizer follow backwards.

A `torch_dist` checkpoint keeps names in an order of its own: under fully parallel saving that of the ranks' shares. The order
of the modules is that in which megatron-core builds them: local layers hold their norms as modules of their own, those of
TransformerEngine inside the linear layers that they feed. Which one it was is not stored, so both are given. The stored order
comes first, since without fully parallel saving it is the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?P<n>\d+)\.(?P<tail>.+)")
_FIRST, _LAST = ("embedding.word_", "embedding.position_", "embedding."), ("decoder.final_", "mtp.", "output_layer.")
_NORM, _MLP_NORM = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
_ATTENTION = tuple(
    f"self_attention.{part}"
    for part in (
        *("linear_proj.", "linear_qkv.", "linear_q_proj.", "linear_q_down_proj.", "linear_q_up_proj.", "linear_kv_down_proj."),
        *("linear_kv_up_proj.", "q_layernorm.", "linear_q_up_proj.layer_norm_", "k_layernorm.", "kv_layernorm."),
        "linear_kv_up_proj.layer_norm_",
    )
)
_MLP = ("mlp.router.", "mlp.linear_fc1.", "mlp.linear_fc2.", "mlp.experts.", "mlp.shared_experts.")
_LOCAL = ("input_layernorm.", _NORM, *_ATTENTION, "pre_mlp_layernorm.", _MLP_NORM, *_MLP)
_FUSED = ("input_layernorm.", "self_attention.linear_proj.", _NORM, *_ATTENTION[1:], "pre_mlp_layernorm.", _MLP_NORM, *_MLP)
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
BUFFERS = ("expert_bias", "local_tokens_per_expert")  # what is saved with the weights and is no parameter


def model_orders(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the orders in which the model may hold these parameters, likeliest first."""
    parameters = [n for n in names if not n.endswith(BUFFERS)]
    made: list[list[str]] = []
    for order in (_as_stored(parameters), _built(parameters, _LOCAL), _built(parameters, _FUSED)):
        if order not in made:
            made.append(order)
            yield order


def _as_stored(names: Sequence[str]) -> list[str]:
    """Put stacked parameters, which come layer after layer for each, into the order layer by layer."""
    places = {n: i for i, n in enumerate(names)}
    layered = [places[n] for n in names if _LAYER.fullmatch(n)]
    first, last = (min(layered), max(layered)) if layered else (len(names), len(names))

    def key(name: str) -> tuple[int, int, int]:
        match = _LAYER.fullmatch(name)
        if match is None:
            return (0 if places[name] < first else 2 if places[name] > last else 1, 0, places[name])
        return 1, int(match["n"]), places[name]

    return sorted(names, key=key)


def _built(names: Sequence[str], parts: Sequence[str]) -> list[str]:
    places = {n: i for i, n in enumerate(names)}

    def key(name: str) -> tuple[int, ...]:
        match = _LAYER.fullmatch(name)
        if match is None or match["head"].startswith("mtp."):
            begin, end = _place(name, _FIRST), _place(name, _LAST)
            return (0, begin, _kind(name), places[name]) if begin < len(_FIRST) else (2, end, _kind(name), places[name])
        expert = re.search(r"local_experts\.(\d+)\.", name)
        inner = (int(expert[1]) if expert else 0, _inside(name))
        return (1, int(match["n"]), _place(match["tail"], parts), *inner, _kind(name), places[name])

    return sorted(names, key=key)


def _inside(name: str) -> int:
    """Put the layers of an expert in order."""
    return 1 if "linear_fc2." in name else 0


def _place(name: str, parts: Iterable[str]) -> int:
    """Return the number of the part whose name is the longest beginning of this one."""
    known = [(len(part), -i) for i, part in enumerate(parts) if name.startswith(part)]
    return -max(known)[1] if known else len(tuple(parts))


def _kind(name: str) -> int:
    return next((i for i, kind in enumerate(_KINDS) if name.endswith(kind)), len(_KINDS))
