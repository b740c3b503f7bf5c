"""Turn modules and optimizers that were saved as whole objects into what their `state_dict()` would have given.

`torch.save(model, path)` writes the object with all its attributes. Only the layout of torch's own classes is read here
(`_parameters`, `_modules`, `param_groups`), whatever class derives from them; nothing of it is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.ckpt_compare.storage.inert_objects import Thing

_FLAT_GROUP = "param_groups."
_TENSORDICT = "tensordict._reductions._make_td"


def as_state_dicts(content: Any) -> Any:
    """Return the content of a torch file with the objects in its outermost dict as state dicts; the rest as it is."""
    if isinstance(content, Mapping):
        if any(str(key).startswith(_FLAT_GROUP) for key in content):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return _apart({str(key): value for key, value in content.items()})  # pyright: ignore
        return {key: _as_state_dict(value) for key, value in content.items()}  # pyright: ignore[reportUnknownVariableType]
    return _as_state_dict(content)


def _as_state_dict(value: Any) -> Any:
    held: Mapping[Any, Any] = value.state if isinstance(value, Thing) and not value.fault else {}
    if isinstance(held.get("_parameters"), Mapping) and isinstance(held.get("_modules"), Mapping):
        return _of_module(held)
    if isinstance(held.get("param_groups"), list) and isinstance(held.get("state"), Mapping):
        return _of_optimizer(held)
    if isinstance(value, Thing) and value.name == _TENSORDICT and len(value.args) > 1 and isinstance(value.args[1], Mapping):
        inner: Any = value.args[1].get("_tensordict")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return {str(name): _as_state_dict(one) for name, one in inner.items()} if isinstance(inner, Mapping) else value
    return value


def _apart(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights and optimizer of a dict that holds the optimizer's state flat beside the weights.

    torch.distributed.checkpoint writes `state.PARAMETER.SLOT` and `param_groups.PARAMETER.SETTING`.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    weights: dict[str, Any] = {}
    for key, value in content.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "param_groups":
            groups.setdefault(name, {"params": [name]})[last] = value
        elif kind == "state" and name:
            state.setdefault(name, {})[last] = value
        else:
            weights[key] = value
    return {"model": weights, "optimizer": {"state": state, "param_groups": list(groups.values())}}


def _of_module(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return name → value of a module's parameters, persistent buffers and, nested, of the modules in it."""
    passing = held.get("_non_persistent_buffers_set")
    left_out = set(map(str, passing)) if isinstance(passing, (set, frozenset, list, tuple)) else set[str]()  # pyright: ignore
    buffers: Any = held.get("_buffers")
    own = {**held["_parameters"], **{k: v for k, v in dict(buffers or {}).items() if str(k) not in left_out}}
    found = {str(name): _as_state_dict(value) for name, value in own.items() if value is not None}
    return found | {str(name): _as_state_dict(inner) for name, inner in held["_modules"].items() if inner is not None}


def _of_optimizer(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's states by number, as its state dict has them; in the object they stand under the parameters."""
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    for group in held["param_groups"]:
        own = [numbers.setdefault(id(p), len(numbers)) for p in group["params"]]
        groups.append({**group, "params": own})
    state = {numbers[id(p)]: value for p, value in held["state"].items() if id(p) in numbers}
    return {"state": state, "param_groups": groups}
