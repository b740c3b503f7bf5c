"""Experts that each rank numbers from 0 on: they get the numbers that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.core.records import Call

_EXPERTS = ("experts", "local_experts")


def number_experts(a: Sequence[Side], b: Sequence[Side]) -> list[str]:
    """Rename the experts of the side that numbers them on each rank, and return a sentence for it.

    Known where all ranks of a side have experts 0 to n - 1, and the other side has n for each of the ranks that share experts:
    those along `ep`, or along `dp` where nothing is said of `ep`.
    """
    of_both = [[{int(number) for _, _, number, _ in _experts(side)} for side in sides] for sides in (a, b)]
    for name, sides, numbers, others in (("A", a, *of_both), ("B", b, *of_both[::-1])):
        axes = sides[0].step_data.place.axes
        axis = "ep" if axes.get("ep", (0, 1))[1] > 1 else "dp"
        ranks, count = axes.get(axis, (0, 1))[1], len(numbers[0]) if numbers else 0
        local = count > 0 and all(own == set(range(count)) for own in numbers)
        if ranks > 1 and local and set[int]().union(*others) == set(range(count * ranks)):
            for side in sides:
                first = side.step_data.place.axes[axis][0] * count
                for call, front, number, rest in list(_experts(side)):
                    call.name = f"{front}{first + int(number)}{rest}"
            return [
                f"each rank of {name} numbers its {count} experts from 0: they were counted over the {ranks} ranks of {axis}"
            ]
    return []


def _experts(side: Side) -> Iterator[tuple[Call, str, str, str]]:
    """Yield each call of an expert: what stands before its number, the number, and what stands behind."""
    for call in (*side.step_data.calls, *(side.step_data.states or ())):
        parts = call.name.split(".") if call.kind != "op" else []
        at = next((i + 1 for i, part in enumerate(parts[:-1]) if part in _EXPERTS and parts[i + 1].isdigit()), 0)
        if at:
            rest = parts[at + 1 :]
            yield call, ".".join(parts[:at]) + ".", parts[at], "".join(f".{part}" for part in rest)
