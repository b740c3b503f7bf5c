"""Give names to optimizer states that are stored by number.

`torch.optim` numbers its states by the order of the parameters in its groups and stores no names (unless it was built from
named parameters). The order is found again from the model's own order and the usual groupings, and accepted only if every
shape fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainprobe.ckpt_compare.pieces import LogicalTensor, Source, whole

_NORM = re.compile(r"(^|[._])(ln|norm|layernorm|layer_norm|rmsnorm)\w*[._]|norm\.weight$|(^|\.)ln_\w+\.", re.IGNORECASE)
Shapes = Mapping[str, tuple[int, ...]]


def is_array(value: Any) -> bool:
    """Whether a leaf is an array that lies in a file."""
    return hasattr(value, "load") and hasattr(value, "format")


def numbered(state: Mapping[Any, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the states of a torch optimizer state dict by number."""
    return {int(k): v for k, v in state.items() if isinstance(v, Mapping) and str(k).isdigit()}


def orders(shapes: Shapes, groups: Sequence[Mapping[str, Any]]) -> Iterator[list[list[str]]]:
    """Yield the orders in which trainers hand parameters to an optimizer, one list a group, likeliest first."""
    if all("param_names" in g for g in groups):
        yield [list(g["param_names"]) for g in groups]
    names = list(shapes)
    if len(groups) == 1:
        yield [names]
    else:
        flat: list[list[str]] = []
        at = 0
        for g in groups:
            flat.append(names[at : at + len(g["params"])])
            at += len(g["params"])
        yield flat
    for decays in _DECAY_RULES:
        yield [[n for n in names if decays(n, shapes[n])], [n for n in names if not decays(n, shapes[n])]]
        yield [[n for n in names if not decays(n, shapes[n])], [n for n in names if decays(n, shapes[n])]]


_DECAY_RULES: tuple[Callable[[str, tuple[int, ...]], bool], ...] = (
    lambda n, s: len(s) > 1,
    lambda n, s: not n.endswith("bias") and not _NORM.search(n),
    lambda n, s: not n.endswith("bias"),
)


def name_states(optimizer: Mapping[str, Any], shapes: Shapes) -> dict[str, Mapping[str, Any]] | None:
    """Return name → state for a torch optimizer state dict, or None when no usual order fits the shapes.

    shapes: name → shape of the model's trainable parameters, in the model's order.
    """
    states, groups = numbered(optimizer.get("state", {})), optimizer.get("param_groups", [])
    for order in orders(shapes, groups):
        if len(order) != len(groups) or any(len(n) != len(g["params"]) for n, g in zip(order, groups, strict=True)):
            continue
        pairs = [
            (n, states.get(int(i))) for ns, g in zip(order, groups, strict=True) for n, i in zip(ns, g["params"], strict=True)
        ]
        if all(name in shapes and _fits(state, shapes[name]) for name, state in pairs):
            return {name: state for name, state in pairs if state is not None}
    return None


def _fits(state: Mapping[str, Any] | None, shape: tuple[int, ...]) -> bool:
    arrays = [v for v in (state or {}).values() if is_array(v) and v.shape]
    return all(a.shape == shape for a in arrays[:1])


def state_tensors(states: Mapping[str, Mapping[str, Any]], where: str) -> tuple[list[LogicalTensor], list[float]]:
    """Return the optimizer's logical tensors and the distinct step counts among the states."""
    tensors: list[LogicalTensor] = []
    steps: set[float] = set()
    for name, state in states.items():
        for slot, value in state.items():
            if slot == "step":
                steps.add(scalar(value))
            elif is_array(value):
                tensors.append(whole(name, _source(value), f"{where}: {name}.{slot}", slot=slot))
    return tensors, sorted(steps)


def _source(value: Any) -> Source:
    return value


def scalar(value: Any) -> float:
    """Return a step count that is stored as a number or as a small array."""
    return float(value.load().reshape(-1)[0]) if is_array(value) else float(value)


def one_or_all(steps: Sequence[float]) -> Any:
    """Return the step count if there is one, the list of them if they are not the same."""
    plain = [int(s) if float(s).is_integer() else s for s in steps]
    return plain[0] if len(plain) == 1 else plain
