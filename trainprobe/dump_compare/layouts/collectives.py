"""What the collectives of a dump prove of the values that went into them: terms that a sum adds up.

A value that the tensor-parallel ranks hand to a sum over just these ranks (`all_reduce`, `reduce_scatter`) is a term on each
of them. It is the same value, and not one of the same shape, if its numbers are the same: the fingerprint where both have one,
or else all statistics. What is handed over in pieces (the list of a `reduce_scatter`) is known by the statistics of all pieces
together. What comes out is the whole on each rank, or a part of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.layouts.joined import Part, agree, together
from trainprobe.dump_compare.layouts.known_splits import Rule
from trainprobe.engine.core.records import Call, Opaque, Value
from trainprobe.engine.core.step_data import leaves

SUMS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
_OPERATIONS = ("RedOpType.SUM", "ReduceOp.SUM")
_SUMMED = 1e-12  # relative: by how much statistics of a whole that was added up of its pieces may be off
TERMS = Rule("a collective of these values", tp="sum")
TERMS_OF_ROWS = Rule("the rows of a weight that each rank holds", tp="sum")

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Sum:
    """What a rank hands to a sum over a group of ranks, and what it gets."""

    group: frozenset[int]
    numbers: Numbers
    bits: int | None
    result: Value | None

    def was_given(self, part: Part) -> bool:
        numbers, bits = part.side.numbers(part.value), part.side.bits(part.value).get("checksum")
        if not tells(numbers):
            return False
        return _are_the_same(numbers, self.numbers) if None in (bits, self.bits) else bits == self.bits


class Collectives:
    """The sums that the ranks of one side took part in. recorded: whether the dump holds collectives."""

    def __init__(self, ranks: Sequence[Side]) -> None:
        self._sums: dict[tuple[int, int], list[_Sum]] = defaultdict(list)  # rank and number of elements → sums
        self.recorded = False
        for side in ranks:
            for call in side.step_data.calls:
                if call.kind == "collective":
                    self.recorded = True
                    for size, found in _sums(side, call):
                        self._sums[side.step_data.place.rank, size].append(found)

    def rule(self, parts: Sequence[Part]) -> Rule | None:
        """Return that parts are terms of a sum, where a collective proves it of all of them; None where none does.

        Of ranks that hold the same numbers they are copies, whatever was done with them.
        """
        peers: dict[tuple[int, ...], list[Part]] = defaultdict(list)
        for part in parts:
            peers[part.data].append(part)
        if not self._sums or not all(self._are_summed(each) for each in peers.values()):
            return None
        return None if all(agree(each) for each in peers.values()) else TERMS

    def results(self, parts: Sequence[Part]) -> list[Part]:
        """Return what the ranks get that hand these parts to a sum; nothing where one of them gets nothing."""
        group = frozenset(part.rank for part in parts)
        found = [self._sum_of(part, group) for part in parts]
        values = [None if each is None else each.result for each in found]
        return [
            replace(part, value=value) for part, value in zip(parts, values, strict=True) if value is not None and all(values)
        ]

    def _are_summed(self, parts: Sequence[Part]) -> bool:
        group = frozenset(part.rank for part in parts)
        return (
            len(group) == len(parts) > 1
            and len({part.shape for part in parts}) == 1
            and all(self._sum_of(part, group) is not None for part in parts)
        )

    def _sum_of(self, part: Part, group: frozenset[int]) -> _Sum | None:
        sums = self._sums.get((part.rank, part.size), ())
        return next((each for each in sums if each.group == group and each.was_given(part)), None)


def tells(numbers: Numbers) -> bool:
    """Return whether statistics tell a value from others of its size: it has all of them, and is no constant."""
    return all(math.isfinite(numbers.get(name, math.nan)) for name in STATISTICS) and numbers["max"] > numbers["min"]


def group_of(call: Call) -> frozenset[int]:
    """Return the global ranks of a collective's group, none where the dump does not say them."""
    group = (call.kwargs or {}).get("group")
    ranks = (group.extra or {}).get("group_ranks") if isinstance(group, Opaque) else None
    return frozenset(ranks) if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) else frozenset()


def is_sum(call: Call) -> bool:
    """Return whether a collective adds up what the ranks hand over."""
    operation = (call.kwargs or {}).get("op")
    named: Any = operation.value if isinstance(operation, Opaque) else None
    return call.name.rpartition(".")[2] in SUMS and named in _OPERATIONS


def _sums(side: Side, call: Call) -> Iterator[tuple[int, _Sum]]:
    """Yield each value that a rank hands to a sum, with its number of elements; of pieces, all together."""
    if not is_sum(call):
        return
    given, got = (list[Any](tree) if isinstance(tree, list) else list[Any]() for tree in (call.args, call.out))
    results: list[Any] = got if len(got) == len(given) else [None for _ in given]
    for tree, result in zip(given, results, strict=True):
        pieces = [value for _, value in leaves(tree, "")]
        sizes = [math.prod(value.shape) for value in pieces]
        statistics = [side.numbers(value) for value in pieces]
        if not pieces or not all(sizes) or any(name not in each for each in statistics for name in STATISTICS):
            continue
        numbers = {name: together(name, [each[name] for each in statistics], sizes) for name in STATISTICS}
        bits = side.bits(tree).get("checksum") if isinstance(tree, Value) else None
        yield sum(sizes), _Sum(group_of(call), numbers, bits, result if isinstance(result, Value) else None)


def _are_the_same(a: Numbers, b: Numbers) -> bool:
    near = [abs(a[name] - b[name]) <= _SUMMED * a["norm"] for name in ("norm", "mean")]
    return a["max"] == b["max"] and a["min"] == b["min"] and all(near)
