"""What becomes of a difference in one call: whether it arrives with what the call is given, or arises there.

A call may give results that are apart by its own rounding and by what it was given. With ε the gap of the coarser format of a
result, εₐ that of what sums are taken in (float32, or float64 for float64), and K the length of the longest sum that the
shapes allow, its own rounding is ε + εₐ·√K (as in engine.compare.verdict). With d the distance of what the call is given (for a
backward call: also of what its forward was given), the ratio of the distance of a result to rounding + d says:

    identical    no distance at all
    rounding     at most ten times the call's own rounding (a module is many ops)
    carried      more, yet explained by what arrives: at most ten times of that
    suspicious   above, and within ten times of that bound, or the dumps cannot say more
    bug          above; or NaN, infinities or a shape on one side alone while all that the call is given is finite and alike

Where the terms of a result cancel, its distance is relative to them and not to what remains (see cancellation).

A quotient can make the largest elements of the smallest, such as Adam's update of a gradient that is zero but for rounding,
and a choice (the largest, a comparison, a rounding to whole numbers) another one of almost equal numbers: what arrives there
explains everything.

All but identical takes the lower end of the distance of a result, and the upper end of what arrives: where only statistics are
known, doubt is for the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from trainprobe.dump_compare.apart import SAME, Apart, apart, dtype
from trainprobe.dump_compare.arguments import other_argument
from trainprobe.dump_compare.cancellation import Terms, cancelled
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.engine.compare.number_formats import FORMATS, coarser
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import owner, slots

Outcome = Literal["identical", "rounding", "carried", "suspicious", "bug", "missing", "unknown"]
_GRAVITY: tuple[Outcome, ...] = ("identical", "rounding", "carried", "suspicious", "bug")
SLACK = 10.0  # times the noise, before a difference is worth a look
# what is smallest may become largest in these
_QUOTIENTS = ("addcdiv", "div", "true_divide", "reciprocal", "rsqrt", "_fused_adam")
# what is almost equal may be told apart otherwise in these
_CHOICES = (
    *("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "amax", "amin", "median", "kthvalue", "unique", "bucketize"),
    *(
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "__eq__",
        "__ne__",
        "where",
        "nonzero",
        "isin",
        "searchsorted",
        "one_hot",
        "masked_select",
    ),
    *("round", "floor", "ceil", "trunc", "sign", "floor_divide", "__floordiv__", "remainder", "long", "int", "multinomial"),
)
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
class Judged:
    """One call of both dumps. given, own: distance of what arrives, and rounding of the call itself, both relative l2.

    argument: a plain argument that is not the same on both sides, as text.
    computed: largest relative distance of plain floats that may have been computed from tensors (see arguments).
    """

    pair: CallPair
    outcome: Outcome = "missing"
    values: list[Distance] = field(default_factory=list[Distance])
    given: float = 0.0
    own: float = 0.0
    argument: str = ""
    computed: tuple[str, float] = "", 0.0

    def rounding(self, value: Distance) -> float:
        """Return what rounding alone may do to a result: as measured, but at least the gap of its format, or by the model."""
        return max(value.floor, value.epsilon) if value.floor else self.own

    @property
    def call(self) -> Call:
        """Return the call as A has it, or as B where A has none."""
        call = self.pair.a or self.pair.b
        assert call is not None
        return call

    @property
    def worst(self) -> Distance | None:
        """Return the result that is furthest apart; of a call without results, what it is given."""
        results = [value for value in self.values if value.result] or self.values
        return max(results, key=lambda value: (value.low, value.apart.high), default=None)


def judge_calls(
    pairs: Sequence[CallPair], a: Side, b: Side, measure: Callable[[Sequence[Judged]], None] | None = None
) -> list[Judged]:
    """Return what became of each call, in order. measure: sets what a third run says of the results (see references)."""
    judged = [_measured(pair, a, b) for pair in pairs]
    by_call = {id(one.pair.a): one for one in judged if one.pair.a is not None}
    for one in judged:  # a module rounds as coarsely as what runs within it (bfloat16 under autocast), and is given its weights
        weights = max((value.apart.high for value in one.values if value.slot.startswith("parameters")), default=0.0)
        for call in enclosing(one.pair.a):
            if id(call) in by_call:
                outer = by_call[id(call)]
                outer.own, outer.given = max(outer.own, one.own), max(outer.given, weights)
    if measure is not None:
        measure(judged)
    _see_cancellation(judged, a, b)
    _explain(judged)
    for one in judged:
        if one.pair.a is not None and one.pair.b is not None:
            one.outcome = _outcome(one)
    return judged


def _explain(judged: Sequence[Judged]) -> None:
    """Let a backward be given what its forward was given too, and quotients and choices be explained by all that arrives.

    A plain float that is another is explained by rounding only where the calls before were as far apart.
    """
    arrived: dict[Hashable, float] = {}
    noise = 0.0  # the largest distance of a result before
    for one in judged:
        call = one.pair.a
        if call is None or one.pair.b is None:
            continue
        if one.computed[1] > SLACK * noise:
            one.argument = one.computed[0]
        of_parameters = call.kind in ("parameter", "state")
        keys = [_module_of(owner(call), arrived)] if of_parameters else [_key(call), _key(call)[:2]]
        if call.phase == "backward":
            one.given = max(one.given, arrived.get(keys[0], 0.0))
        if not of_parameters:
            arrived |= {key: max(one.given, arrived.get(key, 0.0)) for key in keys}
        if call.kind == "op" and _may_jump(one, noise):
            one.given = math.inf
        noise = max([noise, *(value.low for value in one.values if value.result and value.low < math.inf)])


def _module_of(name: str, arrived: Mapping[Hashable, float]) -> Hashable:
    """Return the key of the module that used the parameters of a module: this one, or the first around it that was called."""
    while ("module", name) not in arrived and "." in name:
        name = name.rpartition(".")[0]
    return "module", name


def _may_jump(one: Judged, noise: float) -> bool:
    """Return whether the least that an op is given explains any distance of its results. noise: of the results before.

    Of booleans there are no statistics but their extremes, which hardly ever differ: they count as given while anything is.
    """
    last = one.call.name.rpartition(".")[2]
    chooses = last.rstrip("_") in _CHOICES or last in _CHOICES
    if not chooses and not last.startswith(_QUOTIENTS):
        return False
    unseen = any(not value.result and value.epsilon == 0 and value.apart.evidence == "statistics" for value in one.values)
    return one.given > 0 or (chooses and unseen and noise > 0)


def _see_cancellation(judged: Sequence[Judged], a: Side, b: Side) -> None:
    """Find the terms of the results that are further apart than their own norm explains."""
    terms = Terms(a.step_data.calls, a), Terms(b.step_data.calls, b)
    for one in judged:
        mine, theirs = one.pair.a, one.pair.b
        if mine is None or theirs is None:
            continue
        for i, value in enumerate(one.values):
            if value.result and value.epsilon and not value.floor and SLACK * one.own < value.apart.low < math.inf:
                sides = ((call, value.slot, side) for call, side in zip((mine, theirs), terms, strict=True))
                one.values[i] = replace(value, cancelled=cancelled(sides))


def enclosing(call: Call | None) -> Iterator[Call]:
    """Yield the calls that a call runs within, from the inside."""
    seen: set[int] = set()
    while call is not None and isinstance(call.parent, Call) and id(call.parent) not in seen:
        call = call.parent
        seen.add(id(call))
        yield call


def _measured(pair: CallPair, a: Side, b: Side) -> Judged:
    if pair.a is None or pair.b is None:
        return Judged(pair)
    values = list(_distances(pair.a, a, pair.b, b))
    argument, computed = other_argument(pair.a, pair.b)
    given = max([computed[1], *(value.apart.high for value in values if not value.result)])
    longest = math.sqrt(_longest_sum(pair.a))
    own = max((value.epsilon + _sum_epsilon(value.epsilon) * longest for value in values if value.epsilon), default=0.0)
    return Judged(pair, values=values, given=given, own=own, argument=argument, computed=computed)


def _key(call: Call) -> tuple[str, str, int]:
    return call.kind, call.name, call.call


def _outcome(one: Judged) -> Outcome:
    results = [value for value in one.values if value.result]
    if not any(value.apart.high for value in one.values) and any(value.formats for value in one.values):
        return "rounding"
    if not results:  # nothing comes out, or nothing was recorded of it: what arrives is told where it comes from
        unknown = any(value.apart.evidence == "nothing" for value in one.values)
        return "bug" if one.argument else "unknown" if unknown else "carried" if one.given > 0 else "identical"
    low, high = max(value.low for value in results), max(value.apart.high for value in results)
    if high == 0:
        return "identical"
    if low == 0 and any(value.apart.evidence == "absent" for value in results):
        return "missing"
    if low == 0:
        unknown = any(value.apart.evidence == "nothing" for value in results)
        return "unknown" if unknown else "carried" if one.given > 0 else "suspicious"
    outcomes = {_of_result(one, value) for value in results}
    return next(outcome for outcome in reversed(_GRAVITY) if outcome in outcomes)


def _of_result(one: Judged, value: Distance) -> Outcome:
    own = one.rounding(value)
    if value.low <= (own if one.argument else SLACK * own):
        return "rounding"
    if one.argument or one.given + own == 0:
        return "bug"
    ratio = value.low / (own + one.given) if math.isfinite(one.given) else 0.0
    if ratio <= SLACK:
        return "carried"
    return "suspicious" if one.given > 0 and ratio <= SLACK * SLACK else "bug"


def _distances(left: Call, a: Side, right: Call, b: Side) -> Iterator[Distance]:
    for slot, x, y in _together(dict(slots(left)), dict(slots(right))):
        result = left.kind in ("parameter", "saved") or (left.kind == "state" and slot == "grad") or _is_result(slot)
        if x is None or y is None:
            if result:
                yield Distance(slot, Apart(0.0, math.inf, "absent", f"in {'B' if x is None else 'A'} alone"), True, 0.0)
            continue
        far = SAME if _is_filled_later(left, slot) else apart(a, x, b, y)
        formats = "" if dtype(x) == dtype(y) else f"{dtype(x)} in A and {dtype(y)} in B"
        yield Distance(slot, far, result, _epsilon(x, y), formats)


def _is_filled_later(call: Call, slot: str) -> bool:
    """Return whether what a tensor held before the call says nothing: `torch.empty` and its kin."""
    return call.kind == "op" and call.name.rpartition(".")[2].startswith(("empty", "new_empty")) and slot.startswith("output")


def _together(a: Mapping[str, Value], b: Mapping[str, Value]) -> Iterator[tuple[str, Value | None, Value | None]]:
    """Yield values of the same slot; those that are left over in order, as one tool's third argument is another's keyword.

    What has no partner then comes with None.
    """
    yield from ((slot, value, b[slot]) for slot, value in a.items() if slot in b)
    for results in (False, True):
        mine = [item for item in a.items() if item[0] not in b and _is_result(item[0]) == results]
        theirs = [item for item in b.items() if item[0] not in a and _is_result(item[0]) == results]
        none = (None, None)
        for (slot, value), (other_slot, other) in zip_longest(mine, theirs, fillvalue=none):
            yield slot or other_slot or "", value, other


def _is_result(slot: str) -> bool:
    return slot.partition(".")[0] in _RESULTS


def _epsilon(x: Value, y: Value) -> float:
    formats = [FORMATS.get(value.dtype.rpartition(".")[2].lower()) for value in (x, y)]
    if formats[0] is None or formats[1] is None:
        return 0.0
    rough = coarser(formats[0], formats[1])
    return 0.0 if rough.mantissa is None else rough.epsilon


def _sum_epsilon(epsilon: float) -> float:
    """Return the rounding of what sums are taken in: float64 for float64, float32 for all else."""
    return 2.0**-52 if epsilon < 2.0**-23 else 2.0**-23


def _longest_sum(call: Call) -> int:
    """Return how many terms a sum in this call may have, told by shapes: rows, columns, or all that vanishes."""
    shapes = [value.shape for _, value in slots(call)]
    sizes = [math.prod(shape) for shape in shapes]
    rows = [size // shape[-1] for shape, size in zip(shapes, sizes, strict=True) if shape and shape[-1]]
    vanishing = max(sizes, default=1) // max(1, min((size for size in sizes if size), default=1))
    widest = max((max(shape, default=1) for shape in shapes), default=1)
    return max(1, widest, *rows, vanishing if min(sizes, default=0) <= 1 else 1)
