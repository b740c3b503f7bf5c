"""How far the values of paired calls are apart: all values of a step in one pass, then call by call as `Distance`s."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from trainprobe.dump_compare.call_slots import is_result, named_values
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.intervals import ALIKE, MASKED, SAME, Interval, format_name, intervals
from trainprobe.dump_compare.own_rounding import ATTENTION, WITHIN, Beyond
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.parameter_states import is_made
from trainprobe.engine.compare.number_formats import FORMATS, coarser
from trainprobe.engine.core.records import NOT_WRITTEN, Value
from trainprobe.engine.plan.catalog import OVERWRITING

_AT_ONCE = 4096  # calls
SLACK = 10.0  # times the noise, before a difference is worth a look
Paired = tuple[str, Value | None, Value | None]  # slot, value of A, value of B
_ELSEWHERE = "are one tensor: at input"  # in the note of engine.capture.module_gradients
_EMPTY = ("empty", "new_empty")


class Distance(NamedTuple):
    """How far one value of a call is apart.

    slot: its place in the call, `input.0`, `output`, `grad_input.1`, `weight`. result: whether the call gives it, or is given
    it. epsilon: gap of the coarser of both formats, 0 of whole numbers. formats: both number formats, where they are two.
    cancelled: norm of the terms that were summed to get a result, over its own; 1 where nothing cancels or it does not matter.
    floor: what rounding does to a result as a third run measured it, 0 where none did. from_truth: distances of A and of B from
    a run in higher precision. beyond: what of a result of a call that is given the same is further apart than its own rounding
    (see own_rounding). stored: of a weight before the first step, whether other numbers are stored, however near they are.
    factor: number that makes A's to B's, 0 where none does (see scale_factors).
    """

    slot: str
    interval: Interval
    result: bool
    epsilon: float
    formats: str = ""
    cancelled: float = 1.0
    floor: float = 0.0
    from_truth: tuple[float, float] | None = None
    beyond: Beyond = WITHIN
    stored: bool = False
    factor: float = 0.0

    @property
    def low(self) -> float:
        """Return the lower end of the distance, relative to what was summed to get the value; as it is beside a floor."""
        return self.interval.low / (1.0 if self.floor else self.cancelled)

    @property
    def another(self) -> bool:
        """Return whether the two are not the same stored numbers, in whatever format."""
        unknown = self.interval.evidence == "bits" and math.isinf(self.interval.high)
        return unknown or self.stored or self.interval.low > SLACK * self.epsilon


class _Matched(NamedTuple):
    """The values of two calls, side by side. names: their slots. results: which of them the call gives. shapes: of A."""

    names: tuple[str, ...]
    left: Sequence[Value | None]
    right: Sequence[Value | None]
    results: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]


class Measured(NamedTuple):
    """The distances of a call's values.

    own: the rounding of the call itself. given, weights: the furthest of what it is given, and of its weights among that.
    sums: what accumulation adds to `own`.
    """

    values: list[Distance]
    own: float
    given: float = 0.0
    weights: float = 0.0
    sums: float = 0.0


def measure_calls(pairs: Sequence[CallPair], a: Side, b: Side) -> Iterator[Measured]:
    """Yield how far the values of each pair are apart; of a call without a partner, nothing.

    They are looked at some calls at a time, as the values of all calls would take more memory than all else.
    """
    known = _KnownValues()
    for start in range(0, len(pairs), _AT_ONCE):
        yield from _measure_some(pairs[start : start + _AT_ONCE], a, b, known)


def _measure_some(pairs: Sequence[CallPair], a: Side, b: Side, known: _KnownValues) -> list[Measured]:
    matched = [_matched(pair) for pair in pairs]
    left, right = list[Value](), list[Value]()
    for each in matched:
        if None in each.left or None in each.right:
            both = [(x, y) for x, y in zip(each.left, each.right, strict=True) if x is not None and y is not None]
            left += [x for x, _ in both]
            right += [y for _, y in both]
        else:
            left += each.left  # type: ignore[arg-type]
            right += each.right  # type: ignore[arg-type]
    found = iter(intervals(a, left, b, right))
    return [_measured(pair, each, found, known) for pair, each in zip(pairs, matched, strict=True)]


class _TensorForm(NamedTuple):
    """What follows from the slots, formats and shapes of a call's values. formats: (ε, formats where they are two) of each.

    agreeing: what is said of calls of this form of which all values agree, by how far these are apart.
    """

    formats: Sequence[tuple[float, str]]
    own: float
    sums: float
    agreeing: dict[tuple[Interval | None, ...], Measured]


_NOT_MEASURED = Measured([], 0.0)
_AGREE = frozenset([SAME, ALIKE])


class _KnownValues:
    """What is the same for many calls and is found once."""

    def __init__(self) -> None:
        self.distances: dict[tuple[Any, ...], Distance] = {}
        self.formats: dict[tuple[str, str], tuple[float, str]] = {}
        self.forms: dict[tuple[Any, ...], _TensorForm] = {}

    def form(self, matched: _Matched) -> _TensorForm:
        """Return what follows from the slots, formats and shapes of a call's values."""
        formats = [None if value is None else value.dtype for value in (*matched.left, *matched.right)]
        key = matched.names, matched.results, matched.shapes, *formats
        found = self.forms.get(key)
        if found is None:
            of_each = [
                (0.0, "") if x is None or y is None else self._of_formats(x, y)
                for x, y in zip(matched.left, matched.right, strict=True)
            ]
            coarsest = max((epsilon for epsilon, _ in of_each), default=0.0)
            sums = coarsest and _sum_epsilon(coarsest) * math.sqrt(_longest_sum(matched.shapes))
            found = self.forms[key] = _TensorForm(of_each, coarsest + sums, sums, {})
        return found

    def _of_formats(self, x: Value, y: Value) -> tuple[float, str]:
        """Return the gap of the coarser format, and both formats in words where they are two."""
        pair = x.dtype, y.dtype
        found = self.formats.get(pair)
        if found is None:
            names = format_name(x.dtype), format_name(y.dtype)
            found = _epsilon(*names), "" if names[0] == names[1] else f"{names[0]} in A and {names[1]} in B"
            self.formats[pair] = found
        return found

    def distance(self, slot: str, far: Interval, result: bool, epsilon: float, formats: str) -> Distance:
        """Return a distance; one object for all values that are apart by nothing, as most are."""
        if far.low or not (far.evidence == "statistics" or far is SAME):
            return Distance(slot, far, result, epsilon, formats)
        key = slot, far.evidence, result, epsilon, formats
        found = self.distances.get(key)
        if found is None:
            found = self.distances[key] = Distance(slot, far, result, epsilon, formats)
        return found


def _measured(pair: CallPair, matched: _Matched, found: Iterator[Interval], known: _KnownValues) -> Measured:
    if pair.a is None or pair.b is None:
        return _NOT_MEASURED
    form, call = known.form(matched), pair.a
    whole = None not in matched.left and None not in matched.right
    distances: tuple[Interval | None, ...]
    distances = tuple(islice(found, len(matched.names))) if whole else tuple(_of_pairs(matched, found))
    agrees = _AGREE.issuperset(distances)
    if agrees and distances in form.agreeing:
        return form.agreeing[distances]
    values, given, weights = list[Distance](), 0.0, 0.0
    writes, empty = _overwrites(call.name) if call.kind == "op" else (False, False)
    for slot, far, result, (epsilon, formats) in zip(matched.names, distances, matched.results, form.formats, strict=True):
        if far is None:
            continue
        if (result and empty) or (writes and slot == "input.0") or slot.startswith("kwargs.out"):
            far = SAME if far.high else far
        elif result and far is MASKED:
            far = ALIKE  # little is known of a result; of what is given, doubt is for the call
        values.append(known.distance(slot, far, result, epsilon, formats))
        if not result and far.high > given:
            given = far.high
        if far.high > weights and slot.startswith("parameters"):
            weights = far.high
    measured = Measured(values, form.own, given, weights, form.sums)
    if agrees:
        form.agreeing[distances] = measured
    return measured


def _of_pairs(matched: _Matched, found: Iterator[Interval]) -> Iterator[Interval | None]:
    """Yield how far each pair of values is apart; None for what only one side is given."""
    for x, y, result in zip(matched.left, matched.right, matched.results, strict=True):
        if x is not None and y is not None:
            yield next(found)
        else:
            yield Interval(0.0, math.inf, "absent", f"in {'B' if x is None else 'A'} alone") if result else None


_NONE = _Matched((), (), (), (), ())


def _matched(pair: CallPair) -> _Matched:
    if pair.a is None or pair.b is None:
        return _NONE
    (names, left), (others, right) = named_values(pair.a), named_values(pair.b)
    shapes = tuple([value.shape for value in left])
    backward_of_op = pair.a.kind == "op" and pair.a.phase == "backward"
    elsewhere = any([value.row < 0 for value in (*left, *right)])  # noqa: C419  (a third faster)
    if names == others and not (backward_of_op or elsewhere):
        return _Matched(names, left, right, _results(pair.a.kind, names), shapes)
    together = list(_together(dict(zip(names, left, strict=True)), dict(zip(others, right, strict=True))))
    if backward_of_op:
        together = _of_the_same_nodes(together, pair.a.name.endswith(ATTENTION))
    if elsewhere:
        together = [each for each in together if not (_is_told_elsewhere(each) or _is_not_written(each))]
    names = tuple([slot for slot, _, _ in together])
    return _Matched(names, [x for _, x, _ in together], [y for _, _, y in together], _results(pair.a.kind, names), shapes)


@lru_cache(maxsize=4096)
def _results(kind: str, names: tuple[str, ...]) -> tuple[bool, ...]:
    """Return which of the values of a call it gives: of parameters the gradients, of saved values all."""
    if kind in ("parameter", "saved"):
        return (True,) * len(names)
    made = [is_made(slot) for slot in names] if kind == "state" else []
    if any(made):
        return tuple(made)
    return tuple([is_result(slot) or (kind == "state" and slot.startswith("grad")) for slot in names])


def _is_told_elsewhere(paired: Paired) -> bool:
    """Return whether both dumps say that a gradient stands at another input, as both inputs are one tensor."""
    return all(value is not None and value.row < 0 and _ELSEWHERE in (value.note or "") for value in paired[1:])


def _is_not_written(paired: Paired) -> bool:
    """Return whether a dump says that it is memory which nobody has written."""
    return any(value is not None and value.row < 0 and value.note == NOT_WRITTEN for value in paired[1:])


def _of_the_same_nodes(together: list[Paired], attention: bool) -> list[Paired]:
    """Return the values of an op's backward; gradients that are those at two autograd nodes are without their partners.

    A gradient has the shape of what it belongs to. Where two shapes are not alike, or where one side gives more gradients of
    attention, the op ran as another kernel does, and what was recorded is the gradient within it.
    """
    results = [(x, y) for slot, x, y in together if is_result(slot)]
    other = any(attention if x is None or y is None else tuple(x.shape) != tuple(y.shape) for x, y in results)
    return [(slot, x, None if is_result(slot) else y) for slot, x, y in together] if other else together


@lru_cache(maxsize=4096)
def _overwrites(op: str) -> tuple[bool, bool]:
    """Return whether the first input of an op, and whether its results, may be memory that nobody has filled yet.

    The first is what a tensor holds before it is written to, the others are what `torch.empty` and its kin give: these numbers
    say nothing of a call. What else the tensor held was compared where it was made, and is compared where it is used.
    """
    last = op.rpartition(".")[2]
    return last in OVERWRITING, last.startswith(_EMPTY)


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
