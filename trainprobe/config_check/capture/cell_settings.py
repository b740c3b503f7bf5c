"""Settings of MindSpore's cells and optimizers as they are held: constructors' arguments, rates, the formula of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from trainprobe.config_check.capture.plain_values import argument_names, plain
from trainprobe.config_check.capture.setting_files import flat, source
from trainprobe.config_check.names import load_names
from trainprobe.engine.capture.mindspore.states import rates_of

_NUMBERS = ("beta1", "beta2", "eps", "momentum", "loss_scale", "weight_decay")
_LEFT_OUT = frozenset({"keep_prob", "dtype", "data_format"})  # of Dropout `p` is told
_LONGEST = 60  # characters of a text that is a setting
_CORRECTED = {"bias_correction": True, "eps": "behind the bias correction"}
_OF_NN = {"bias_correction": True, "eps": "before the bias correction", "weight_decay": "added to the gradient"}
_ADDED, _DECOUPLED = {"weight_decay": "added to the gradient"}, {"weight_decay": "decoupled"}
# classes, whole names, whose update was read in the source of MindSpore 2.7 to 2.10 → how it calculates
FORMULAS: Mapping[str, Mapping[str, Any]] = {
    "mindspore.nn.optim.adam.Adam": _OF_NN,
    "mindspore.nn.optim.adam.AdamWeightDecay": {"bias_correction": False, **_DECOUPLED},
    "mindspore.nn.optim.sgd.SGD": _ADDED,
    "mindspore.nn.optim.momentum.Momentum": _ADDED,
    "mindspore.experimental.optim.adam.Adam": {**_CORRECTED, **_ADDED},
    "mindspore.experimental.optim.adamw.AdamW": {**_CORRECTED, **_DECOUPLED},
    "mindspore.experimental.optim.sgd.SGD": _ADDED,
}


def describe(cell: Any) -> str:
    """Return class and settings of a cell, as `Dropout(p=0.1)`: the constructor's arguments that it keeps under their names.

    They are numbers, switches, short words, and shapes. `to_float` is the format that a cell was told to compute in.
    """
    kept: dict[str, Any] = {}
    names = load_names()
    for name in argument_names(type(cell)):
        value = vars(cell).get(name)
        if name.startswith("_") or name in _LEFT_OUT or name.endswith("_init") or names.is_place(name) or names.is_secret(name):
            continue
        if isinstance(value, bool | int | float) or _is_shape(value) or (isinstance(value, str) and len(value) <= _LONGEST):
            kept[name] = tuple(value) if isinstance(value, list) else value
    if isinstance(cell, mindspore.nn.Dropout) and "p" not in kept:
        kept["p"] = round(1 - cell.keep_prob, 12)
    formats = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    told = next((text for name, text in formats.items() if getattr(cell, name, False) is True), None)
    if told is not None:
        kept["to_float"] = told
    text = ", ".join(f"{name}={value}" for name, value in kept.items())
    return f"{type(cell).__name__}({text})" if text else type(cell).__name__


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(x, int) for x in value)  # pyright: ignore[reportUnknownVariableType]


def optimizer_source(number: int, optimizer: Any) -> dict[str, Any]:
    """Return class, formula, learning rates and plain numbers of an optimizer, as they are now, as a source of settings."""
    kind = type(optimizer)
    formula = FORMULAS.get(f"{kind.__module__}.{kind.__name__}")
    about = {"class": kind.__name__, "formula": dict(formula) if formula is not None else "unknown"}
    held: Any = getattr(optimizer, "param_groups", None)
    if isinstance(held, list):
        groups = {f"group{i}": _group(group) for i, group in enumerate(held)}
        return source("optimizer", str(number), flat(about | groups))
    decays: Any = getattr(optimizer, "weight_decay", None)
    several = isinstance(decays, tuple | list) and not isinstance(decays, mindspore.Tensor)
    names = [name for name in _NUMBERS if hasattr(optimizer, name) and not (several and name == "weight_decay")]
    numbers = {name: _number(getattr(optimizer, name)) for name in names}
    groups = (
        _groups(optimizer, decays) if several else {"group0": {"lr": _as_one(present_rates(optimizer)), **_names(optimizer)}}
    )
    flags = getattr(optimizer, "decay_flags", ()) if getattr(optimizer, "exec_weight_decay", False) else ()
    spared = [str(p.name) for p, decayed in zip(optimizer.parameters, flags, strict=False) if not decayed]
    return source("optimizer", str(number), flat({**about, **numbers, **groups, "without_decay": [] if several else spared}))


def _names(optimizer: Any) -> dict[str, list[str]]:
    return {"parameters": [str(p.name) for p in optimizer.parameters]}


def _groups(optimizer: Any, decays: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of an optimizer by learning rate and weight decay, in the order in which these first come."""
    rates, found = rates_of(optimizer), dict[tuple[Any, Any], list[str]]()
    for i, (p, decay) in enumerate(zip(optimizer.parameters, decays, strict=False)):
        rate = rates[i if len(rates) > 1 else 0] if rates else None
        found.setdefault((rate if rate is None else float(str(np.float32(rate))), _number(decay)), []).append(str(p.name))
    return {
        f"group{i}": {"lr": rate, "weight_decay": decay, "parameters": names}
        for i, ((rate, decay), names) in enumerate(found.items())
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: _number(value) for key, value in group.items() if key not in ("params", "grad_centralization")}
    return {**numbers, "parameters": [str(p.name) for p in group["params"]]}


def present_rates(optimizer: Any) -> list[float]:
    """Return the rates that the next call of an optimizer uses, each that differs once, as they were written."""
    return [float(str(np.float32(rate))) for rate in dict.fromkeys(rates_of(optimizer))]


def clipping_source(cell: Any) -> dict[str, Any]:
    """Return the settings of a cell that clips gradients by their norm, as PyTorch's function calls them."""
    norm = next((value for name in ("clip_norm", "max_norm") if (value := getattr(cell, name, None)) is not None), None)
    values = {"function": "clip_grad_norm_", "max_norm": _number(norm), "norm_type": 2.0}
    return source("clipping", type(cell).__name__.strip("_"), values)


def clips(cell: Any) -> bool:
    """Tell whether a cell clips gradients by the norm of all: that of `clip_by_global_norm`, or MindFormers' own."""
    return type(cell).__name__ in ("_ClipByGlobalNorm", "ClipGradNorm")


def _number(value: Any) -> Any:
    return _as_written(value.asnumpy()) if isinstance(value, mindspore.Tensor) else plain(value)


def _as_written(array: npt.NDArray[Any]) -> Any:
    """Return a number that an optimizer keeps as a tensor as it was written, 0.1 and not 0.10000000149; of several a list."""
    return _as_one([float(str(x)) if array.dtype.kind == "f" else x.item() for x in array.reshape(-1)])


def _as_one(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found
