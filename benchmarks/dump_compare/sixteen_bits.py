"""Trainings in 16 bits: pairs that are healthy, and pairs of which one kernel or weight of one side is wrong.

A wrong kernel changes what it gives by less than ten units of the format, mostly. What no dump can show is left out by
arithmetic: `can_show` compares what the fault does to each number of a dump with what independent roundings would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.dump_compare.kernels import (
    HEALTHY,
    Fault,
    Replaced,
    in_16_bits,
    norm_with,
    part,
    sigmoid_gelu,
    tanh_gelu,
    times,
    truncated,
    without_bias,
)
from benchmarks.dump_compare.runs import Way

PLANS: dict[str, dict[str, Any]] = {
    "statistics": {"level": "mix"},
    "fingerprints": {"level": "mix", "summary": "both"},
    "tensors": {"level": "mix", "task": "tensor"},
}
_SGD: dict[str, Any] = {"algorithm": "SGD", "optimizer": {"momentum": 0.9}}
REGIMES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "float16": {"dtype": torch.float16, **_SGD},
}


@dataclass(frozen=True)
class Plant:
    """first: matches the place that must be named. fault: in a kernel. weights: changes the weights of the second run."""

    name: str
    first: str
    fault: Fault | None = None
    weights: Callable[[nn.Module], Any] | None = None
    subject: str = "gpt"


_UP = r"Functional\.linear\.10\.forward|Module\.layers\.1\.up\.Linear\.forward"
_UP_BACKWARD = r"linear\.10\.backward|Module\.layers\.1\.up\.Linear\.(backward|parameters_grad)"
_ATTENTION = r"scaled_dot_product_attention\.1\.forward|Module\.layers\.1\.attention\.Attention\.forward"
_NORM = r"layer_norm\.3\.forward|Module\.layers\.1\.norm2\.LayerNorm\.forward"
_NORM_BACKWARD = r"layer_norm\.3\.backward|Module\.layers\.1\.norm2\.LayerNorm\.(backward|parameters_grad)"
_GELU = r"gelu\.1\.forward|Module\.layers\.1\.act\.GELU\.forward"
_GELU_BACKWARD = r"gelu\.1\.backward|Module\.layers\.1\.act\.GELU\.backward"
_CONV = r"conv2d\.2\.forward|Module\.blocks\.1\.conv\.Conv2d\.forward"
_ANY = slice(None)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _linear(name: str, change: Any, at: int = 10) -> Plant:
    return Plant(f"linear: {name}", _UP, Fault("addmm", change, at))


def _off(scale: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += (torch.randn(weight.shape, generator=generator) * weight.float().std() * scale).to(weight.dtype)

    return change


def _of_weight(change: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    return lambda model: change(model.get_parameter("layers.1.up.weight"))


PLANTS = [
    *(_linear(f"gain {gain}", times(gain)) for gain in (1.01, 1.02, 1.05, 1.1)),
    _linear("a column zero", part((_ANY, 7), 0.0)),
    _linear("a column doubled", part((_ANY, 7), 2.0)),
    _linear("a row zero", part((5,), 0.0)),
    _linear("a row doubled", part((5,), 2.0)),
    _linear("a tile zero", part((slice(16, 24), slice(8, 16)), 0.0)),
    _linear("a tile doubled", part((slice(16, 24), slice(8, 16)), 2.0)),
    _linear("rounded to zero", truncated),
    _linear("sums in 16 bits", in_16_bits),
    _linear("no bias", without_bias),
    *(Plant(f"attention: gain {gain}", _ATTENTION, Fault(_FLASH, times(gain), 1)) for gain in (1.01, 1.05)),
    Plant("attention: a head zero", _ATTENTION, Fault(_FLASH, part((_ANY, 2), 0.0), 1)),
    Plant("attention: a head 1.05", _ATTENTION, Fault(_FLASH, part((_ANY, 2), 1.05), 1)),
    Plant("attention: the last token", _ATTENTION, Fault(_FLASH, part((_ANY, _ANY, -1), 1.1), 1)),
    Plant("norm: eps 1e-3", _NORM, Fault("native_layer_norm", norm_with(1e-3), 3)),
    Plant("norm: eps 1e-2", _NORM, Fault("native_layer_norm", norm_with(1e-2), 3)),
    Plant("norm: n - 1", _NORM, Fault("native_layer_norm", norm_with(1e-5, biased=False), 3)),
    Plant("norm: gain 1.02", _NORM, Fault("native_layer_norm", times(1.02), 3)),
    Plant("gelu: tanh", _GELU, Fault("gelu", tanh_gelu, 1)),
    Plant("gelu: sigmoid", _GELU, Fault("gelu", sigmoid_gelu, 1)),
    Plant("gelu: gain 1.01", _GELU, Fault("gelu", times(1.01), 1)),
    Plant("embedding: a column zero", r"embedding\.0\.forward|Module\.embed\.", Fault("embedding", part((..., 3), 0.0), 0)),
    Plant("loss: gain 1.05", r"cross_entropy\.0\.forward", Fault("nll_loss_forward", times(1.05), 0)),
    Plant("backward: gradient of a weight 1.05", _UP_BACKWARD, Fault("mm", times(1.05), 18)),
    Plant("backward: a row of that zero", _UP_BACKWARD, Fault("mm", part((3,), 0.0), 18)),
    Plant("backward: gradient of an input 1.02", _UP_BACKWARD, Fault("mm", times(1.02), 17)),
    Plant("backward: gelu 1.02", _GELU_BACKWARD, Fault("gelu_backward", times(1.02), 1)),
    Plant("backward: norm, a column doubled", _NORM_BACKWARD, Fault("native_layer_norm_backward", part((..., 5), 2.0), 3)),
    Plant("weights: all 3 % off", r"Module\.(root|embed)\.|embedding\.0\.forward", weights=_off(0.03)),
    Plant("weights: all 0.3 % off", r"Module\.(root|embed)\.|embedding\.0\.forward", weights=_off(0.003)),
    Plant("weights: one 1.01", _UP, weights=_of_weight(lambda w: w.mul_(1.01))),
    Plant("weights: a row zero", _UP, weights=_of_weight(lambda w: w[4].zero_())),
    Plant("weights: one element", _UP, weights=_of_weight(lambda w: w[4, 5].add_(0.01))),
    Plant("weights: two rows swapped", _UP, weights=_of_weight(lambda w: w.copy_(w[[1, 0, *range(2, len(w))]]))),
    Plant("conv: gain 1.02", _CONV, Fault("convolution", times(1.02), 2), subject="conv"),
    Plant("conv: a channel zero", _CONV, Fault("convolution", part((_ANY, 3), 0.0), 2), subject="conv"),
    Plant("conv: a channel 1.1", _CONV, Fault("convolution", part((_ANY, 3), 1.1), 2), subject="conv"),
]


def can_show(plant: Plant, plan: str, seen: tuple[Tensor, Tensor] | None) -> bool:
    """Return whether what dumps hold of the right and the wrong result can tell the fault from rounding.

    Independent roundings of both sides change the sum of elements by √(Σu²/6) in the root mean square, u being the unit of
    each, their norm by √(Σu²x²/6)/‖x‖, and an extreme by one unit at most: three times the first two, or more than the third,
    can be told. So can elements that are more than a unit apart. Weights are stored and not rounded: any other number tells
    them, but not the same numbers in another order, where only statistics are known.
    """
    if plant.fault is None:
        return plan != "statistics" or "swapped" not in plant.name
    assert seen is not None
    info = torch.finfo(seen[0].dtype)
    right, wrong = (x.double().flatten() for x in seen)
    unit = torch.exp2(torch.floor(torch.log2(torch.maximum(right.abs(), wrong.abs()).clamp_min(info.tiny)))) * info.eps
    n, norm = len(right), float(right.norm()) or 1.0
    mean = abs(float(wrong.sum() - right.sum())) / (3 * math.sqrt(float((unit**2).sum()) / 6))
    norms = abs(float(wrong.norm()) - norm) / (3 * math.sqrt(float((unit * right).square().sum()) / 6) / norm)
    extremes = max(
        abs(float(f(wrong) - f(right))) / float(unit[int((right if f is torch.max else -right).argmax())])
        for f in (torch.max, torch.min)
    )
    found = max(mean, norms, extremes) > 1 if n > 1 else abs(float(wrong - right)) > float(unit)
    return found or (plan == "tensors" and bool(((wrong - right).abs() > 1.001 * unit).any()))


def planted() -> Iterator[tuple[Plant, str, bool, Way, Way]]:
    """Yield each fault, a regime, whether other roundings came before it, and both ways to run it.

    Behind a first difference all kernels of the wrong side compute in float64, so that the faulty one is given other numbers.
    Weights are known before any difference.
    """
    for behind in (False, True):
        for plant in PLANTS:
            for regime, how in REGIMES.items():
                if plant.fault is not None or not behind:
                    kernels = Replaced(HEALTHY["float64"] if behind else None, plant.fault)
                    yield plant, regime, behind, Way(**how), Way(**how, kernels=kernels, weights=plant.weights)


_HEALTHY: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        "repeat": {},
        "threads": {"threads": 2},
        "eager attention": {"model": {"eager": True}},
        "bias in another operator": {"apart": True},
        "attention in parts": {"math": True},
        "four micro-batches": {"micros": 4},
        "one batch": {"micros": 1},
        **{name: {"kernels": Replaced(HEALTHY[name])} for name in ("float64", "other order", "rows", "halves")},
    },
    "conv": {
        "threads": {"threads": 2},
        "channels last": {"channels_last": True},
        "float64": {"kernels": Replaced(HEALTHY["float64"])},
        "optimizer": {"optimizer": {"foreach": False}},
    },
    "lstm": {
        "threads": {"threads": 2},
        "other order": {"kernels": Replaced(HEALTHY["other order"])},
        "four micro-batches": {"micros": 4},
    },
    "moe": {"threads": {"threads": 2}, "other order": {"kernels": Replaced(HEALTHY["other order"])}},
}


def healthy() -> Iterator[tuple[str, str, Way, Way]]:
    """Yield the name of each healthy pair, its subject, and both ways to run it."""
    for subject, ways in _HEALTHY.items():
        for name, other in ways.items():
            for regime, how in REGIMES.items():
                way = Way(**how)
                yield f"{subject}: {name} [{regime}]", subject, way, replace(way, **_together(how, other))


def _together(how: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**other, "optimizer": {**how.get("optimizer", {}), **other["optimizer"]}} if "optimizer" in other else other
