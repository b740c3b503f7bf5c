"""How far the values of paired calls are apart: all values of a step in one pass, then call by call as `Distance`s."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from trainprobe.dump_compare.apart import ALIKE, MASKED, SAME, Apart, apart_all, format_name
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.engine.compare.number_formats import FORMATS, coarser
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

SLACK = 10.0  # times the noise, before a difference is worth a look
Paired = tuple[str, Value | None, Value | None]  # slot, value of A, value of B
_ELSEWHERE = "are one tensor: at input"  # in the note of engine.capture.module_gradients
_WRITES = frozenset(["__setitem__", "copy_", "fill_", "zero_"])
_EMPTY = ("empty", "new_empty")
_RESULTS = {"output", "grad_input"}  # first parts of the slots of what a call gives; the others are what it is given


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one value of a call is apart.

    slot: its place in the call, `input.0`, `output`, `grad_input.1`, `weight`. result: whether the call gives it, or is given
    it. epsilon: gap of the coarser of both formats, 0 of whole numbers. formats: both number formats, where they are two.
    cancelled: norm of the terms that were summed to get a result, over its own; 1 where nothing cancels or it does not matter.
    floor: what rounding does to a result as a third run measured it, 0 where none did. from_truth: distances of A and of B from
    a run in higher precision.
    """

    slot: str
    apart: Apart
    result: bool
    epsilon: float
    formats: str = ""
    cancelled: float = 1.0
    floor: float = 0.0
    from_truth: tuple[float, float] | None = None

    @property
    def low(self) -> float:
        """Return the lower end of the distance, relative to what was summed to get the value; as it is beside a floor."""
        return self.apart.low / (1.0 if self.floor else self.cancelled)

    @property
    def another(self) -> bool:
        """Return whether the two are not the same stored numbers, in whatever format."""
        unknown = self.apart.evidence == "bits" and math.isinf(self.apart.high)
        return unknown or self.apart.low > SLACK * self.epsilon


@dataclass(slots=True)
class _Matched:
    """The values of two calls, side by side: (slot, value of A, value of B, whether it is a result)."""

    values: list[tuple[str, Value | None, Value | None, bool]]
    shapes: tuple[tuple[int, ...], ...]  # of A


@dataclass(slots=True)
class Measured:
    """The distances of a call's values. own: the rounding of the call itself."""

    values: list[Distance] = field(default_factory=list[Distance])
    own: float = 0.0


def measure_calls(pairs: Sequence[CallPair], a: Side, b: Side) -> list[Measured]:
    """Return how far the values of each pair are apart; of a call without a partner, nothing."""
    matched = [_matched(pair) for pair in pairs]
    left = [x for each in matched for _, x, y, _ in each.values if x is not None and y is not None]
    right = [y for each in matched for _, x, y, _ in each.values if x is not None and y is not None]
    found = iter(apart_all(a, left, b, right))
    known = _Known()
    return [_measured(pair, each, found, known) for pair, each in zip(pairs, matched, strict=True)]


class _Known:
    """What is the same for many calls and is found once."""

    def __init__(self) -> None:
        self.distances: dict[tuple[Any, ...], Distance] = {}
        self.formats: dict[tuple[str, str], tuple[float, str]] = {}
        self.longest: dict[tuple[tuple[int, ...], ...], float] = {}

    def of_formats(self, x: Value, y: Value) -> tuple[float, str]:
        """Return the gap of the coarser format, and both formats in words where they are two."""
        pair = x.dtype, y.dtype
        found = self.formats.get(pair)
        if found is None:
            names = format_name(x.dtype), format_name(y.dtype)
            found = _epsilon(*names), "" if names[0] == names[1] else f"{names[0]} in A and {names[1]} in B"
            self.formats[pair] = found
        return found

    def distance(self, slot: str, far: Apart, result: bool, epsilon: float, formats: str) -> Distance:
        """Return a distance; one object for all values that are apart by nothing, as most are."""
        if far.low or not (far.evidence == "statistics" or far is SAME):
            return Distance(slot, far, result, epsilon, formats)
        key = slot, far.evidence, result, epsilon, formats
        found = self.distances.get(key)
        if found is None:
            found = self.distances[key] = Distance(slot, far, result, epsilon, formats)
        return found

    def root_of_longest_sum(self, shapes: tuple[tuple[int, ...], ...]) -> float:
        """Return √K of a call whose values have these shapes."""
        found = self.longest.get(shapes)
        if found is None:
            found = self.longest[shapes] = math.sqrt(_longest_sum(shapes))
        return found


def _measured(pair: CallPair, matched: _Matched, found: Iterator[Apart], known: _Known) -> Measured:
    if pair.a is None or pair.b is None:
        return Measured()
    measured, coarsest = Measured(), 0.0
    for slot, x, y, result in matched.values:
        if x is None or y is None:
            if result:
                away = Apart(0.0, math.inf, "absent", f"in {'B' if x is None else 'A'} alone")
                measured.values.append(Distance(slot, away, True, 0.0))
            continue
        far = next(found)
        if far.high:
            far = _of_the_call(far, pair.a, slot, result)
        epsilon, formats = known.of_formats(x, y)
        measured.values.append(known.distance(slot, far, result, epsilon, formats))
        coarsest = max(coarsest, epsilon)
    if coarsest:
        measured.own = coarsest + _sum_epsilon(coarsest) * known.root_of_longest_sum(matched.shapes)
    return measured


def _of_the_call(far: Apart, call: Call, slot: str, result: bool) -> Apart:
    """Return what a distance says of a call."""
    if _is_overwritten(call, slot):
        return SAME
    return ALIKE if result and far is MASKED else far  # little is known of a result; of what is given, doubt is for the call


def _matched(pair: CallPair) -> _Matched:
    if pair.a is None or pair.b is None:
        return _Matched([], ())
    left, right = slots(pair.a), slots(pair.b)
    shapes = tuple([value.shape for _, value in left])
    of_kind = pair.a.kind in ("parameter", "saved")
    of_state = pair.a.kind == "state"
    if len(left) == len(right) and all([x[0] == y[0] for x, y in zip(left, right, strict=True)]):  # noqa: C419  (a third faster)
        together = [(slot, x, y) for (slot, x), (_, y) in zip(left, right, strict=True)]
    else:
        together = _together(dict(left), dict(right))
    if pair.a.kind == "op" and pair.a.phase == "backward":
        together = _of_the_same_nodes(list(together))
    if any([value.row < 0 for _, value in left]):  # noqa: C419
        together = [each for each in together if not _is_told_elsewhere(each)]
    values = [(slot, x, y, of_kind or (of_state and slot.startswith("grad")) or is_result(slot)) for slot, x, y in together]
    return _Matched(values, shapes)


def _is_told_elsewhere(paired: Paired) -> bool:
    """Return whether both dumps say that a gradient stands at another input, as both inputs are one tensor."""
    return all(value is not None and value.row < 0 and _ELSEWHERE in (value.note or "") for value in paired[1:])


def _of_the_same_nodes(together: list[Paired]) -> list[Paired]:
    """Return the values of an op's backward; gradients that are those at two autograd nodes are without their partners.

    A gradient has the shape of what it belongs to. Where two shapes are not alike, the op ran as another kernel does, attention
    for one, and what was recorded is the gradient within it.
    """
    other = any(
        is_result(slot) and x is not None and y is not None and tuple(x.shape) != tuple(y.shape) for slot, x, y in together
    )
    return [(slot, x, None if is_result(slot) else y) for slot, x, y in together] if other else together


def _is_overwritten(call: Call, slot: str) -> bool:
    """Return whether the numbers of a value say nothing of a call, as memory that nobody has filled yet may stand there.

    That is what `torch.empty` and its kin give, and what a tensor holds before it is written to. What else it held was compared
    where it was made, and is compared where it is used.
    """
    last = call.name.rpartition(".")[2] if call.kind == "op" else ""
    return (last in _WRITES and slot == "input.0") or (last.startswith(_EMPTY) and is_result(slot))


def _together(a: Mapping[str, Value], b: Mapping[str, Value]) -> Iterator[Paired]:
    """Yield values of the same slot; those that are left over in order, as one tool's third argument is another's keyword.

    What has no partner then comes with None.
    """
    yield from ((slot, value, b[slot]) for slot, value in a.items() if slot in b)
    for results in (False, True):
        mine = [item for item in a.items() if item[0] not in b and is_result(item[0]) == results]
        theirs = [item for item in b.items() if item[0] not in a and is_result(item[0]) == results]
        none = (None, None)
        for (slot, value), (other_slot, other) in zip_longest(mine, theirs, fillvalue=none):
            yield slot or other_slot or "", value, other


@lru_cache(maxsize=4096)
def is_result(slot: str) -> bool:
    """Return whether a call gives what stands at a slot, or is given it."""
    return slot.partition(".")[0] in _RESULTS


def _epsilon(name: str, other: str) -> float:
    formats = FORMATS.get(name), FORMATS.get(other)
    if formats[0] is None or formats[1] is None:
        return 0.0
    rough = coarser(formats[0], formats[1])
    return 0.0 if rough.mantissa is None else rough.epsilon


def _sum_epsilon(epsilon: float) -> float:
    """Return the rounding of what sums are taken in: float64 for float64, float32 for all else."""
    return 2.0**-52 if epsilon < 2.0**-23 else 2.0**-23


def _longest_sum(shapes: Sequence[Sequence[int]]) -> int:
    """Return how many terms a sum in a call may have, told by shapes: rows, columns, or all that vanishes."""
    sizes = [math.prod(shape) for shape in shapes]
    rows = [size // shape[-1] for shape, size in zip(shapes, sizes, strict=True) if shape and shape[-1]]
    vanishing = max(sizes, default=1) // max(1, min((size for size in sizes if size), default=1))
    widest = max((max(shape, default=1) for shape in shapes), default=1)
    return max(1, widest, *rows, vanishing if min(sizes, default=0) <= 1 else 1)
