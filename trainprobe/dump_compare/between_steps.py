"""What changes between two steps: weights, or an optimizer's state, that are no longer what the step before has left.

Where both dumps hold a step and the next one, each weight and state is as far apart at the beginning of the second as it was
behind the first. If it is further apart, something has changed it on one side: a checkpoint that was loaded without it, say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.intervals import format_name
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.pairing import RankPair
from trainprobe.dump_compare.parameter_states import AFTER, state_slot
from trainprobe.engine.compare.movement import Numbers, moved_otherwise, shares
from trainprobe.engine.core.records import Value
from trainprobe.errors import FormatError, UnsafeFile

_AGREES = 0.05  # a gradient that is no further apart is no rounding alone
Left = Mapping[tuple[str, str], float]  # parameter and slot → how far apart a step has left it


def is_step(judged: Judged) -> bool:
    """Return whether a call is what an optimizer makes of a parameter."""
    return judged.call.kind == "state" and any(value.slot.endswith(AFTER) for value in judged.values)


def left_by(calls: Sequence[Judged]) -> dict[tuple[str, str], float]:
    """Return how far apart a step has left weights and states, where both dumps hold them."""
    return {
        (one.call.name, value.slot.removesuffix(AFTER)): value.interval.high
        for one in calls
        if is_step(one)
        for value in one.values
        if value.slot.endswith(AFTER)
    }


def changed(judged: Judged, left: Left) -> tuple[Distance, float] | None:
    """Return the first weight or state that is further apart than the step before has left it, and how far that was."""
    if judged.call.kind != "state" or judged.call.phase != "step":
        return None
    for value in judged.values:
        slot = state_slot(value.slot)
        was = left.get((judged.call.name, slot), math.inf)
        if not value.result and value.interval.low > SLACK * max(was, value.epsilon):
            return value, was
    return None


Moving = Mapping[str, tuple[Numbers, Numbers]]  # weight → its statistics in A and in B


class WeightsOfStep(NamedTuple):
    """Weights in single precision as a step begins and as its optimizer leaves them; those whose gradients agree."""

    begins: Moving
    leaves: Moving
    sure: Set[str]


NO_WEIGHTS = WeightsOfStep({}, {}, frozenset())


def weights_of(calls: Sequence[Judged], a: Side, b: Side) -> WeightsOfStep:
    """Return what both dumps hold of weights, from the calls of modules and from what a monitor saw of parameters."""
    found: list[dict[str, tuple[Numbers, Numbers]]] = [{}, {}]
    sure: set[str] = set()
    for one in calls:
        state = one.call.kind == "state" and one.call.phase == "step"
        module = one.call.kind == "module" and one.call.phase == "forward" and one.call.call == 0
        if one.pair.a is None or one.pair.b is None or not (state or module):
            continue
        sure.update(one.call.name for value in one.values if value.slot == "grad" and value.interval.high < _AGREES and state)
        for slot, mine in (one.pair.a.params or {}).items():
            theirs = (one.pair.b.params or {}).get(slot)
            wanted = module or slot in ("value", f"value{AFTER}")
            if wanted and isinstance(mine, Value) and isinstance(theirs, Value) and _is_single(mine) and _is_single(theirs):
                name = one.call.name if state else f"{one.call.name}.{slot}"
                found[slot == f"value{AFTER}"][name] = _numbers(a, mine), _numbers(b, theirs)
    return WeightsOfStep(found[0], found[1], sure)


def _numbers(side: Side, value: Value) -> Numbers:
    numbers = side.numbers(value)
    return {name: numbers[name] for name in STATISTICS if name in numbers}


def _is_single(value: Value) -> bool:
    return format_name(value.dtype) == "float32"


def optimizer_parts(now: WeightsOfStep, after: Moving, steps: int) -> str:
    """Return which weights the optimizer has moved otherwise, and how far, as text or "" (see `moved_otherwise`).

    now: of the step. after: the weights behind it. steps: of the optimizer since the beginning.
    """
    moved = shares((name, *now.begins[name], *after[name]) for name in now.begins if name in after)
    found = moved_otherwise(moved, steps, now.sure)
    if found is None:
        return ""
    names, share = found
    apart = f"{names[0]} first: it is {share:.2g} times its own movement apart"
    return f"{len(names)} of {len(moved)} weights move otherwise, {apart}"


def who_changed(judged: Judged, value: Distance, before: RankPair, now: RankPair) -> str:
    """Return which ranks of which side hold something else than the step before has left, "" where the dumps do not say it.

    before, now: the folders of all ranks of both steps, which are read once more.
    """
    slot = state_slot(value.slot)
    said: list[str] = []
    sides = (("A", judged.pair.a, before.a, now.a), ("B", judged.pair.b, before.b, now.b))
    for side, call, *folders in sides:
        if call is None:
            continue
        left, held = (dict(_held(folder, call.name, at)) for folder, at in zip(folders, (slot + AFTER, slot), strict=True))
        ranks = sorted({at[0] for at, numbers in left.items() if at not in held or _differ(numbers, held[at])})
        said += [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {side}"] if ranks else []
    return " and ".join(said)


def _differ(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def _held(folder: Path, parameter: str, slot: str) -> Iterator[tuple[tuple[int, str], Mapping[str, float]]]:
    """Yield (rank, which part of the tensor), and the numbers of what each rank's dump says of a parameter."""
    for path in sorted(folder.glob("rank*")):
        try:
            side = Side(path)
        except (FormatError, UnsafeFile):
            continue
        for call in side.step_data.states:
            value = (call.params or {}).get(slot) if call.name == parameter else None
            if isinstance(value, Value):
                part = side.step_data.place.rank, str((value.extra or {}).get("shard"))
                yield part, {**side.numbers(value), **side.bits(value)}
