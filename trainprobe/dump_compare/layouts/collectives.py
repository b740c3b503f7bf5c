"""What the collectives of a dump prove of the values that went into them and came out: terms, parts in an order, and copies.

A value that the tensor-parallel ranks hand to a sum over just these ranks (`all_reduce`, `reduce_scatter`) is a term on each
of them; what they hand to an `all_gather` is a part on each, in the order of the group. What comes out of a sum, a gather or a
broadcast is the same on each rank, and of a `reduce_scatter` or `scatter` a part. It is the same value, and not one of the same
shape, if its numbers are the same: the fingerprint where both have one, or else all statistics. What is handed over in pieces
(the list of a `reduce_scatter`) is known by the statistics of all pieces together.

What an `all_to_all` sends to whom is a part of what it is given; along which dimension the whole is split before and behind it
is left to the sizes, since it may send tokens to experts as well as heads for tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.dump_compare.call_slots import group_ranks
from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.layouts.cuts import Cut, along
from trainprobe.dump_compare.layouts.joined import RankPart, agree, together
from trainprobe.dump_compare.layouts.sharding_by_numbers import are_the_same, cut_by_shapes, tells
from trainprobe.dump_compare.layouts.split_table import SplitRule
from trainprobe.engine.core.records import Call, Opaque, Value
from trainprobe.engine.core.step_data import leaves

SUMS = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced")
_COPIED = ("all_reduce", "all_reduce_coalesced", "broadcast")  # of which each rank gets the same
_OPERATIONS = ("RedOpType.SUM", "ReduceOp.SUM")
_NEAR = 12  # calls behind a gather among which its pieces may be put together
TERMS = SplitRule("a collective of these values", tp="sum")
TERMS_OF_ROWS = SplitRule("the rows of a weight that each rank holds", tp="sum")
COPIES = SplitRule("a collective that gave these values", tp="copy")

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a rank hands to a collective over a group of ranks. results: what it gets, and what it makes of that at once."""

    group: tuple[int, ...]
    numbers: Numbers
    bits: int | None
    summed: bool
    results: Sequence[Value]

    def is_of(self, part: RankPart) -> bool:
        """Return whether a part is what was handed over."""
        numbers, bits = part.side.numbers(part.value), part.side.bits(part.value).get("checksum")
        if not tells(numbers):
            return False
        return are_the_same(numbers, self.numbers) if None in (bits, self.bits) else bits == self.bits


class Collectives:
    """What the ranks of one side did together. recorded: whether the dump holds collectives."""

    def __init__(self, ranks: Sequence[Side]) -> None:
        self._sent: dict[tuple[int, int], list[_Sent]] = defaultdict(list)  # rank and number of elements → what was handed over
        self._copies: dict[tuple[int, int], list[_Sent]] = defaultdict(list)  # → what each rank of a group got alike
        self.recorded = False
        for side in ranks:
            for i, call in enumerate(side.step_data.calls):
                if call.kind == "collective":
                    self.recorded = True
                    for size, found in _sent(side, call, i):
                        self._sent[side.step_data.place.rank, size].append(found)
                    for size, found in _copied(side, call):
                        self._copies[side.step_data.place.rank, size].append(found)

    def rule(self, parts: Sequence[RankPart], whole: Sequence[RankPart] = ()) -> SplitRule | None:
        """Return what a collective proves of parts, all of them; None where none does. whole: what the other side holds.

        Of ranks that hold the same numbers they are copies, whatever was done with them.
        """
        peers: dict[tuple[int, ...], list[RankPart]] = defaultdict(list)
        for part in parts:
            peers[part.data].append(part)
        sent = [self._handed_over(each) for each in peers.values()]
        if not all(sent):
            return COPIES if all(self._are_copies(each) for each in peers.values()) else None
        if all(agree(each) for each in peers.values()):
            return None
        if all(found[0].summed for found in sent):
            return TERMS
        return None if any(found[0].summed for found in sent) else _parts(parts, whole, sent[0])

    def passed_on(self, parts: Sequence[RankPart], whole: RankPart) -> Iterator[tuple[list[RankPart], Cut | None]]:
        """Yield what the ranks get of a collective that they hand parts of a whole to, and how that lies over them."""
        found = self._handed_over(parts)
        for results in zip(*(each.results for each in found), strict=False):
            got = [replace(part, value=value) for part, value in zip(parts, results, strict=True)]
            cut = cut_by_shapes(whole.shape, got)
            ordered = [part.rank for part in parts] == [*found[0].group]
            if all(part.shape == whole.shape for part in got):
                yield got, None
            elif cut is not None and ordered and found[0].summed:
                yield got, cut

    def _handed_over(self, parts: Sequence[RankPart]) -> list[_Sent]:
        """Return what each rank hands over that holds these parts; nothing where one of them does not."""
        group = {part.rank for part in parts}
        if not len(group) == len(parts) > 1 or len({part.shape for part in parts}) > 1:
            return []
        found = [_first(self._sent.get((part.rank, part.size), ()), part, group) for part in parts]
        same = {(each.group, each.summed) for each in found if each is not None}
        return [each for each in found if each is not None] if None not in found and len(same) == 1 else []

    def _are_copies(self, parts: Sequence[RankPart]) -> bool:
        group = {part.rank for part in parts}
        return len(group) == len(parts) > 1 and all(
            _first(self._copies.get((part.rank, part.size), ()), part, group) is not None for part in parts
        )


def _first(sent: Sequence[_Sent], part: RankPart, group: set[int]) -> _Sent | None:
    return next((each for each in sent if {*each.group} == group and each.is_of(part)), None)


def _parts(parts: Sequence[RankPart], whole: Sequence[RankPart], sent: Sequence[_Sent]) -> SplitRule:
    """Return that parts lie side by side, and along which dimension, where their order is that of the group."""
    cut = cut_by_shapes(whole[0].shape, parts) if len(whole) == 1 else None
    found = None if cut is None else along(whole[0].shape, cut)
    ordered = [part.rank for part in sorted(parts, key=lambda part: part.tensor)] == [*sent[0].group]
    return SplitRule("a gather of these values", tp=found.dim if found is not None and ordered else "split")


def is_sum(call: Call) -> bool:
    """Return whether a collective adds up what the ranks hand over."""
    operation = (call.kwargs or {}).get("op")
    named: Any = operation.value if isinstance(operation, Opaque) else None
    return _last(call) in SUMS and named in _OPERATIONS


def _last(call: Call) -> str:
    return call.name.rpartition(".")[2]


def _sent(side: Side, call: Call, place: int) -> Iterator[tuple[int, _Sent]]:
    """Yield each value that a rank hands to a sum or a gather, with its number of elements; of pieces, all together."""
    gathers = _last(call) in _GATHERS
    if not (gathers or is_sum(call)):
        return
    given, got = (list[Any](tree) if isinstance(tree, list) else list[Any]() for tree in (call.args, call.out))
    results: list[Any] = got if len(got) == len(given) else [got if gathers else None for _ in given]
    for tree, result in zip(given, results, strict=True):
        found = _of(side, tree)
        if found is not None:
            whole = result if isinstance(result, Value) else None
            made = [] if whole is None else [whole]
            if gathers:
                made = [*made, *_put_together(side, place, [value for _, value in leaves(result, "")])]
            size, numbers, bits = found
            yield size, _Sent(tuple(group_ranks(call)), numbers, bits, not gathers, made)


def _copied(side: Side, call: Call) -> Iterator[tuple[int, _Sent]]:
    """Yield each value that a rank gets as all of its group do, with its number of elements."""
    if _last(call) not in (*_COPIED, *_GATHERS[1:]) or not isinstance(call.out, list):
        return
    for tree in call.out:
        found = _of(side, tree)
        if found is not None:
            size, numbers, bits = found
            yield size, _Sent(tuple(group_ranks(call)), numbers, bits, False, ())


def _of(side: Side, tree: Any) -> tuple[int, Numbers, int | None] | None:
    """Return size, statistics and fingerprint of a value, or of all its pieces together; None where they are not known."""
    pieces = [value for _, value in leaves(tree, "")]
    sizes = [math.prod(value.shape) for value in pieces]
    statistics = [side.numbers(value) for value in pieces]
    if not pieces or not all(sizes) or any(name not in each for each in statistics for name in STATISTICS):
        return None
    numbers = {name: together(name, [each[name] for each in statistics], sizes) for name in STATISTICS}
    return sum(sizes), numbers, side.bits(tree).get("checksum") if isinstance(tree, Value) else None


def _put_together(side: Side, place: int, pieces: Sequence[Value]) -> Iterator[Value]:
    """Yield what a rank makes at once of what it has gathered: what `cat` gives of it, in whatever order."""
    of_all = _of(side, [*pieces])
    for call in side.step_data.calls[place + 1 : place + 1 + _NEAR] if of_all is not None else ():
        if call.kind == "op" and _last(call) in ("cat", "concat") and isinstance(call.args, list) and call.args:
            given = _of(side, call.args[0])
            whole = call.out[0] if isinstance(call.out, list) and len(call.out) == 1 else call.out
            same = given is not None and of_all is not None and given[0] == of_all[0] and are_the_same(given[1], of_all[1])
            if same and isinstance(whole, Value):
                yield whole
