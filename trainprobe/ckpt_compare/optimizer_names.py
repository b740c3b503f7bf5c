"""Give names to optimizer states that are stored by number.

`torch.optim` numbers its states by the order of the parameters in its groups and stores no names (unless it was built from
named parameters). The order is found again from the model's own order and the usual groupings, and accepted only if every
shape fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from trainprobe.ckpt_compare.pieces import LogicalTensor, Source, whole
from trainprobe.ckpt_compare.plain_state import digest, plain
from trainprobe.engine.compare.number_formats import decode
from trainprobe.errors import FormatError

_NORM = re.compile(r"(^|[._])(ln|norm|layernorm|layer_norm|rmsnorm)\w*[._]|norm\.weight$|(^|\.)ln_\w+\.", re.IGNORECASE)
_NUMBERED = "{}: its states fit no usual order of the parameters, and are compared by their numbers"
_NO_SETTINGS = frozenset(["params", "param_names", "foreach", "fused", "capturable", "differentiable"])
Shapes = Mapping[str, tuple[int, ...]]
Steps = dict[float, set[str]]  # a count of steps → the parameters that have it


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
    order = _order(optimizer, shapes)
    if order is None:
        return None
    states = numbered(optimizer.get("state", {}))
    return {name: states[number] for name, number, _ in order if number in states}


def _order(optimizer: Mapping[str, Any], shapes: Shapes) -> list[tuple[str, int, Mapping[str, Any]]] | None:
    """Return (name, number, group) of all parameters of an optimizer, or None when no usual order fits the shapes."""
    states, groups = numbered(optimizer.get("state", {})), optimizer.get("param_groups", [])
    for order in orders(shapes, groups):
        if len(order) != len(groups) or any(len(n) != len(g["params"]) for n, g in zip(order, groups, strict=True)):
            continue
        placed = [(n, int(i), g) for ns, g in zip(order, groups, strict=True) for n, i in zip(ns, g["params"], strict=True)]
        if all(name in shapes and _fits(states.get(number), shapes[name]) for name, number, _ in placed):
            return placed
    return None


def settings(optimizer: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return setting → value of an optimizer's groups, such as `lr`; of several values a text that tells whose each is.

    Settings that only say how a step is carried out are left out. Nothing where the parameters cannot be named.
    """
    groups = optimizer.get("param_groups", [])
    if all(isinstance(p, str) for g in groups for p in g["params"]):
        held = [(str(name), group) for group in groups for name in group["params"]]
    else:
        held = [(name, group) for name, _, group in _order(optimizer, shapes) or ()]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, group in held for key in group if key not in _NO_SETTINGS):
        by_value: dict[str, list[str]] = {}
        for name, group in held:
            by_value.setdefault(repr(plain(group.get(key))), []).append(name)
        found[key] = plain(held[0][1].get(key)) if len(by_value) == 1 else _told(by_value)
    return found


def _told(by_value: Mapping[Any, Collection[str]]) -> str:
    parts = [f"{value} of {len(names)} parameters ({digest(sorted(names))[:6]})" for value, names in by_value.items()]
    return ", ".join(sorted(parts))


def _fits(state: Mapping[str, Any] | None, shape: tuple[int, ...]) -> bool:
    arrays = [v for v in (state or {}).values() if is_array(v) and v.shape]
    return all(a.shape == shape for a in arrays[:1])


def optimizer_states(
    optimizer: Mapping[str, Any],
    named: Mapping[str, Mapping[str, Any]] | None,
    shapes: Shapes,
    key: str,
    where: str,
    notes: list[str],
) -> tuple[list[LogicalTensor], dict[str, Any]]:
    """Return the logical tensors of a torch optimizer state dict, and its step count with its settings.

    named: name → state; None where no order fits: states then keep their numbers behind `key`, which is noted. shapes: name →
    shape of the parameters that were named. where: the file, for messages.
    """
    if named is None:
        named = {f"{key}.{number}": value for number, value in numbered(optimizer.get("state", {})).items()}
        notes.append(_NUMBERED.format(where))
    tensors, steps = state_tensors(named, where)
    return tensors, {**step_count(steps, optimizer), **settings(optimizer, shapes)}


def state_tensors(states: Mapping[str, Mapping[str, Any]], where: str) -> tuple[list[LogicalTensor], Steps]:
    """Return the optimizer's logical tensors and the step counts among the states."""
    tensors: list[LogicalTensor] = []
    steps: Steps = {}
    for name, state in states.items():
        for slot, value in state.items():
            if slot == "step":
                steps.setdefault(scalar(value, f"{name} in {where}"), set()).add(name)
            elif is_array(value):
                tensors.append(whole(name, _source(value), f"{where}: {name}.{slot}", slot=slot))
    return tensors, steps


def _source(value: Any) -> Source:
    return value


def scalar(value: Any, where: str = "an optimizer") -> float:
    """Return a step count that is stored as a number or as a small array; raise FormatError where it is no number."""
    if not is_array(value):
        if isinstance(value, int | float):
            return float(value)
        raise FormatError(f"the step count of {where} is {f'{value!r}':.40}: expected a number")
    numbers = decode(value.load(), value.format).reshape(-1)
    if not len(numbers) or (numbers != numbers[0]).any():
        raise FormatError(f"the step count of {where} is an array of shape {value.shape}: expected one number")
    return float(numbers[0])


def one_or_all(steps: Collection[float]) -> Any:
    """Return the step count if there is one; of several all, and whose each is where that is known."""
    if len(steps) > 1 and isinstance(steps, Mapping):
        return _told({f"{step:g}": names for step, names in sorted(steps.items())})
    plain = [int(s) if float(s).is_integer() else s for s in sorted(steps)]
    return plain[0] if len(plain) == 1 else plain


def step_count(steps: Steps, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `step` and the count of an optimizer; 0 where it has no states yet, nothing where its states do not count."""
    if steps:
        return {"step": one_or_all(steps)}
    return {} if optimizer.get("state") else {"step": 0}
