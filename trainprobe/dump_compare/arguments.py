"""What a call is given beside numbers of tensors: plain arguments that are others, and what only one side gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainprobe.engine.compare.number_formats import LIMITS
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_CLOSE = 1e-3  # relative: floats that may be the same number, computed twice


def other_argument(left: Call, right: Call) -> tuple[str, tuple[str, float]]:
    """Return the first plain argument that is another on the two sides, as text or "", and the floats that are almost the same.

    Two floats within a thousandth of each other may have been computed in the training, from tensors that differ by rounding:
    of these the one that is furthest apart, as text, and its relative distance. The same limit of two number formats (the
    lowest number, with which masks are filled) is no other argument: it only has a distance.
    """
    close = "", 0.0
    if _has_tensors_alone(left) or _has_tensors_alone(right):
        return "", close
    mine, theirs = plain_arguments(left), plain_arguments(right)
    for at in [at for at in mine if at in theirs and repr(mine[at]) != repr(theirs[at])]:
        x, y = mine[at], theirs[at]
        far = abs(x - y) / max(abs(x), abs(y)) if isinstance(x, float) and isinstance(y, float) and x != y else 1.0
        if _is_one_limit(x, y):
            close = max(close, ("", far), key=lambda found: found[1])
            continue
        said = f"{at} is {x!r} in A and {y!r} in B"
        if not far <= _CLOSE:
            return said, close
        if far > close[1]:
            close = said, far
    return "", close


def _is_one_limit(x: Any, y: Any) -> bool:
    """Return whether two floats are the same limit (lowest, largest, smallest normal, epsilon) of two number formats."""
    return isinstance(x, float) and isinstance(y, float) and LIMITS.get(x, "") == LIMITS.get(y)


def given_alone(left: Call, right: Call) -> str:
    """Return what only one side gives to a call, as text or "": `attn_mask is given in B alone`.

    An argument is the same by place and by keyword. What is left out has the default of the call, which no dump tells, so this
    is a reason for a difference and no difference in itself.
    """
    tensor = tensor_alone(left, right)
    if tensor:
        return tensor
    mine, theirs = plain_arguments(left), plain_arguments(right)
    lone = [[(at, x) for at, x in one.items() if at not in other] for one, other in ((mine, theirs), (theirs, mine))]
    for at, x in list(lone[0]):
        same = next((i for i, (_, y) in enumerate(lone[1]) if repr(x) == repr(y)), None)
        if same is not None:
            lone[0].remove((at, x))
            del lone[1][same]
    said = [f"{at} is {x!r} in {side}" for side, rest in zip("AB", lone, strict=True) for at, x in rest[:1]]
    return f"{said[0]} and not given in {'B' if lone[0] else 'A'}" if len(said) == 1 else ", ".join(said)


def tensor_alone(left: Call, right: Call) -> str:
    """Return which tensor only one side gives to a call, as text or ""."""
    tensors = [[slot for slot, _ in slots(call) if slot.partition(".")[0] in ("input", "kwargs")] for call in (left, right)]
    for side, mine, theirs in (("A", *tensors), ("B", *reversed(tensors))):
        if len(mine) > len(theirs):
            lone = [slot for slot in mine if slot not in theirs]
            return f"{(lone or mine)[-1].removeprefix('kwargs.')} is given in {side} alone"
    return ""


def about_rates(reported: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence for each learning rate of which somebody reports another. reported: who ("in A") → scalars."""
    names = dict.fromkeys(name for scalars in reported.values() for name in scalars if name == "lr" or name.startswith("lr/"))
    said: list[str] = []
    for name in names:
        (where, usual), *others = [(who, scalars[name]) for who, scalars in reported.items() if name in scalars]
        other = next((f"{number:g} {who}" for who, number in others if number != usual), None)
        said += [f"the learning rate {name} is {usual:g} {where} and {other}"] if other is not None else []
    return said


def rate_of_update(left: Call, right: Call) -> str:
    """Return by what number the learning rate of one side is larger, as operators of the optimizer tell it, as text or "".

    They add the step times a negative number that has the rate as a factor: `addcdiv_` of Adam, `add_` of SGD.
    """
    rates = [_step_size(call) for call in (left, right)]
    if None in rates or rates[0] == rates[1]:
        return ""
    return f"the learning rate of B is {rates[1] / rates[0]:.4g} times that of A"  # pyright: ignore[reportOperatorIssue]


def _step_size(call: Call) -> float | None:
    given = plain_arguments(call)
    if call.parent != "optimizer" or not ("lr" in given or re.search(r"add(cdiv)?_?$", call.name)):
        return None
    known = given["lr"] if "lr" in given else next((x for x in given.values() if isinstance(x, float) and x < 0), None)
    return known if isinstance(known, float) and known else None


def plain_arguments(call: Call) -> dict[str, Any]:
    """Return the numbers, booleans and texts that a call is given, by place ("argument 1") or keyword."""
    return {**dict(_plain(call.args, "argument")), **dict(_plain(call.kwargs, ""))}


def _has_tensors_alone(call: Call) -> bool:
    """Return whether a call is given tensors, one after the other, and nothing else: most are."""
    return not call.kwargs and isinstance(call.args, list) and set(map(type, call.args)) <= {Value}


def _plain(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (bool, int, float, str)):
        yield at, tree
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from _plain(item, f"{at} {i}")
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _plain(item, f"{at} {key}".strip())
