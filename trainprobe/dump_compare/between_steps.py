"""What changes between two steps: weights, or an optimizer's state, that are no longer what the step before has left.

Where both dumps hold a step and the next one, each weight and state is as far apart at the beginning of the second as it was
behind the first. If it is further apart, something has changed it on one side: a checkpoint that was loaded without it, say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.intervals import format_name
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.pairing import RankPair
from trainprobe.dump_compare.parameter_states import AFTER, state_slot
from trainprobe.engine.compare.movement import Numbers, moved_otherwise, shares
from trainprobe.engine.core.records import Value
from trainprobe.errors import FormatError, UnsafeFile

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


def weights_of(calls: Sequence[Judged], a: Side, b: Side) -> tuple[Moving, Moving]:
    """Return the weights in single precision as the step begins, and as its optimizer leaves them, where dumps hold them."""
    found: tuple[dict[str, tuple[Numbers, Numbers]], dict[str, tuple[Numbers, Numbers]]] = {}, {}
    for one in calls:
        if one.pair.a is None or one.pair.b is None:
            continue
        state, module = one.call.kind == "state" and one.call.phase == "step", one.call.kind == "module" and one.call.call == 0
        if not state and not (module and one.call.phase == "forward"):
            continue
        for slot, mine in (one.pair.a.params or {}).items():
            theirs = (one.pair.b.params or {}).get(slot)
            if isinstance(mine, Value) and isinstance(theirs, Value) and _is_single(mine) and _is_single(theirs):
                name = one.call.name if state else f"{one.call.name}.{slot}"
                if module or slot in ("value", f"value{AFTER}"):
                    numbers = (
                        {key: n for key in STATISTICS if (n := side.numbers(v).get(key)) is not None}
                        for side, v in ((a, mine), (b, theirs))
                    )
                    found[slot.endswith(AFTER)][name] = tuple(numbers)  # type: ignore[assignment]
    return found


def _is_single(value: Value) -> bool:
    return format_name(value.dtype) == "float32"


def optimizer_parts(before: Moving, after: Moving, steps: int) -> tuple[str, float, float] | None:
    """Return the first weight that the optimizer has moved otherwise, how far, and the median (see `moved_otherwise`)."""
    return moved_otherwise(shares((name, *before[name], *after[name]) for name in before if name in after), steps)


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
