"""What explains a difference without being one: a parameter without a gradient, a part of the model in another format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from trainprobe.dump_compare.judge import Judged


def causes(calls: Sequence[Judged], place: float = math.inf) -> list[str]:
    """Return the causes before a place, in words; of several of one kind the first is named."""
    before = [one for one in calls if one.pair.place <= place]
    found = [list(dict.fromkeys(without_gradient(before))), _in_another_format(before)]
    return [f"{kind[0]}{f' (and {len(kind) - 1} more)' if len(kind) > 1 else ''}" for kind in found if kind]


def without_gradient(calls: Sequence[Judged]) -> Iterator[str]:
    """Yield each parameter that has a gradient on one side alone."""
    used = {one.call.name for one in calls if one.call.kind == "parameter" and one.pair.a and one.pair.b}
    used |= {
        one.call.name
        for one in calls
        if one.call.kind == "module" and one.call.phase == "backward" and one.pair.a and one.pair.b
    }
    for one in calls:
        name, phase, kind = one.call.name, one.call.phase, one.call.kind
        if kind == "state" and phase == "step" and one.pair.a and one.pair.b:
            held = ["grad" in (call.params or {}) for call in (one.pair.a, one.pair.b)]
            if held[0] != held[1]:
                yield f"{name} has no gradient in {'B' if held[0] else 'A'}"
        elif kind == "parameter" or (kind == "state" and phase == "backward"):
            alone = one.pair.a is None or one.pair.b is None
            if alone and kind == "state":
                yield f"{name} has no gradient in {'A' if one.pair.a is None else 'B'}"
            elif alone and name in used:
                yield from (
                    f"{name}.{slot} has no gradient in {'A' if one.pair.a is None else 'B'}" for slot in one.call.params or {}
                )
            for value in one.values:
                if value.interval.evidence == "absent" and kind == "parameter":
                    yield f"{name}.{value.slot} has no gradient in {'B' if value.interval.note == 'in A alone' else 'A'}"


def _in_another_format(calls: Sequence[Judged]) -> list[str]:
    """Return which part of the model has weights of another number format, where the rest has not."""
    weights = [
        (one.call.name, value.formats)
        for one in calls
        if one.call.kind == "module" and one.call.phase == "forward"
        for value in one.values
        if value.slot.startswith("parameters.") and value.epsilon
    ]
    other = [(name, formats) for name, formats in weights if formats]
    if not other or len(other) == len(weights):
        return []
    names = [name.split(".") for name, _ in other]
    common = ".".join(parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*names, strict=False)))
    return [f"{common or other[0][0]} is {other[0][1]}"]
