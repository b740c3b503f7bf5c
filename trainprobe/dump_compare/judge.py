"""What becomes of a difference in one call: whether it arrives with what the call is given, or arises there.

A call may give results that are apart by its own rounding and by what it was given. With ε the gap of the coarser format of a
result, εₐ that of what sums are taken in (float32, or float64 for float64), and K the length of the longest sum that the
shapes allow, its own rounding is ε + εₐ·√K: a sum in another order wanders as a random walk (Higham 2002, Accuracy and
Stability of Numerical Algorithms, §2.8 and §4.2). With d the distance of what the call is given (for a backward call: also of
what its forward was given), the ratio of the distance of a result to rounding + d says:

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
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from trainprobe.dump_compare.arguments import other_argument
from trainprobe.dump_compare.cancellation import Terms, cancelled, kind_of
from trainprobe.dump_compare.distances import SLACK, Distance, Measured, measure_calls
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.equal_inputs import hold_to_own_rounding, see_weights
from trainprobe.dump_compare.own_rounding import COARSE, SURELY, roundings
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import owner

Outcome = Literal["identical", "rounding", "carried", "suspicious", "bug", "missing", "unknown"]
_GRAVITY: tuple[Outcome, ...] = ("identical", "rounding", "carried", "suspicious", "bug")
# what is smallest may become largest in these
_QUOTIENTS = ("addcdiv", "div", "true_divide", "reciprocal", "rsqrt", "_fused_adam")
# whose slope jumps: where a share d of the elements lies that near to the jump, gradients are √d apart
_KINKS = ("relu", "leaky_relu", "prelu", "hardtanh", "hardswish", "hardsigmoid", "clamp", "threshold", "abs", "max_pool")
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


@dataclass(slots=True)
class Judged:
    """One call of both dumps. given, own: distance of what arrives, and rounding of the call itself, both relative l2.

    argument: a plain argument that is not the same on both sides, as text.
    computed: largest relative distance of plain floats that may have been computed from tensors (see arguments).
    weights: largest distance of the weights that a module is given.
    excused: slots of what an optimizer keeps, and is given, that is only as far apart as its gradients are.
    sums: what accumulation adds to `own`.
    moved: the lower end of `given`: by how much a number of what arrives moved.
    """

    pair: CallPair
    outcome: Outcome = "missing"
    values: list[Distance] = field(default_factory=list[Distance])
    given: float = 0.0
    own: float = 0.0
    argument: str = ""
    computed: tuple[str, float] = "", 0.0
    weights: float = 0.0
    excused: frozenset[str] = frozenset()
    sums: float = 0.0
    moved: float = 0.0

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
        return max(results, key=lambda value: (value.low, value.interval.high), default=None)


def judge_calls(
    pairs: Sequence[CallPair], a: Side, b: Side, measure: Callable[[Sequence[Judged]], None] | None = None
) -> list[Judged]:
    """Return what became of each call, in order. measure: sets what a third run says of the results (see references)."""
    judged = [_with_distances(*found) for found in zip(pairs, measure_calls(pairs, a, b), strict=True)]
    _round_as_what_runs_within(judged)
    _give_weights_below(judged)
    if measure is not None:
        measure(judged)
    _see_cancellation(judged, a, b)
    _explain(judged)
    for one in judged:
        if one.pair.a is not None and one.pair.b is not None:
            hold_to_own_rounding(one, a, b)
            see_weights(one, a, b)
            one.outcome = _outcome(one)
    return judged


def _round_as_what_runs_within(judged: Sequence[Judged]) -> None:
    """Let a module round as coarsely as what runs within it (bfloat16 under autocast), and be given the weights of that.

    The gradients of its weights are rounded so too, whatever their own format is.
    """
    by_call = {id(one.pair.a): one for one in judged if one.pair.a is not None}
    for one in judged:
        own, weights = one.own, one.weights
        for call in enclosing(one.pair.a):
            outer = by_call.get(id(call))
            if outer is not None and (own > outer.own or weights > outer.given):
                outer.own, outer.given = max(outer.own, own), max(outer.given, weights)
    modules: dict[str, float] = {}
    for one in judged:
        if one.call.kind == "module":
            modules[one.call.name] = max(modules.get(one.call.name, 0.0), one.own)
    for one in judged:
        if one.own and (one.call.kind == "parameter" or (one.call.kind == "state" and one.call.phase == "backward")):
            one.own = max(one.own, modules.get(owner(one.call), 0.0))


def _give_weights_below(judged: Sequence[Judged]) -> None:
    """Let a module be given the weights below its name too: an expert that is joined over micro-batches is within one alone."""
    below: dict[str, float] = {}
    for one in judged:
        name = one.call.name if one.weights > 0 and one.call.kind == "module" else ""
        while name:
            name = name.rpartition(".")[0]
            below[name] = max(below.get(name, 0.0), one.weights)
    for one in judged if below else ():
        if one.call.kind == "module" and one.call.name in below:
            one.given = max(one.given, below[one.call.name])


def _explain(judged: Sequence[Judged]) -> None:
    """Let a backward be given what its forward was given too, and quotients and choices be explained by all that arrives.

    A plain float that is another is explained by rounding only where the calls before were as far apart.
    """
    arrived: dict[Hashable, float] = {}
    moved: dict[Hashable, float] = {}  # the lower ends of these
    noise = 0.0  # the largest distance of a result before
    for one in judged:
        call = one.pair.a
        if call is None or one.pair.b is None:
            continue
        if one.computed[1] > SLACK * noise:
            one.argument = one.computed[0]
        of_parameters = call.kind in ("parameter", "state")
        key = _module_of(owner(call), arrived) if of_parameters else (call.kind, call.name, call.call)
        if call.phase == "backward":
            unknown = noise if of_parameters else 0.0  # tied weights: of a module unknown
            one.given, one.moved = max(one.given, arrived.get(key, unknown)), max(one.moved, moved.get(key, unknown))
            one.given = max(one.given, math.sqrt(one.given)) if kind_of(call).startswith(_KINKS) else one.given
        kept = one.given if one.own <= COARSE else max([one.given, *_results_apart(one)])  # a backward may use the result
        if not of_parameters and (kept > 0 or call.kind == "module"):  # which modules were called is asked for too
            for each in (key, key[:2]):
                if kept >= arrived.get(each, 0.0):
                    arrived[each] = kept
                moved[each] = max(moved.get(each, 0.0), one.moved)
        if _makes_much_of_little(one, noise):
            one.given = math.inf
        if not (call.kind == "state" and call.phase == "step"):
            noise = _largest_result(one, noise)


def _largest_result(one: Judged, noise: float) -> float:
    """Return the largest distance of a result of this call, or of those before (noise)."""
    lows = (value.low for value in one.values if value.result and value.interval.low > 0)
    return max([noise, *(low for low in lows if low < math.inf)])


def _results_apart(one: Judged) -> Iterator[float]:
    return (value.interval.high for value in one.values if value.result)


def _makes_much_of_little(one: Judged, noise: float) -> bool:
    """Return whether all is explained by what arrives. noise: the largest distance of a result before."""
    if one.call.kind == "state":  # an optimizer divides by what it is given, and may be given more than was recorded
        return one.call.phase == "step" and max(one.given, noise) > 0
    return one.call.kind == "op" and (_may_jump(one, noise) or (noise > 0 and _is_unseen(one)))


def _module_of(name: str, arrived: Mapping[Hashable, float]) -> tuple[Any, ...]:
    """Return the key of the module that used the parameters of a module: this one, or the first around it that was called."""
    while ("module", name) not in arrived and "." in name:
        name = name.rpartition(".")[0]
    return "module", name


def _may_jump(one: Judged, noise: float) -> bool:
    """Return whether the least that an op is given explains any distance of its results. noise: of the results before.

    Of booleans there are no statistics but their extremes, which hardly ever differ: they count as given while anything is.
    """
    jumps, chooses = _is_a_jump(one.call.name)
    if not jumps:
        return False
    unseen = any(not value.result and value.epsilon == 0 and value.interval.evidence == "statistics" for value in one.values)
    return one.given > 0 or (chooses and unseen and noise > 0)


def _is_unseen(one: Judged) -> bool:
    """Return whether an op is given whole numbers alone of which only statistics are known: those of any choice are the same.

    Which experts tokens go to is one number for each, as many as before, with the same mean and norm.
    """
    given = [value for value in one.values if not value.result] if one.given == 0 else []
    return bool(given) and all([value.epsilon == 0 and value.interval.evidence == "statistics" for value in given])  # noqa: C419


@lru_cache(maxsize=4096)
def _is_a_jump(name: str) -> tuple[bool, bool]:
    """Return whether an op makes much of little, as quotients and choices do, and whether it is a choice."""
    last = name.rpartition(".")[2]
    chooses = last.rstrip("_") in _CHOICES or last in _CHOICES
    return chooses or last.startswith(_QUOTIENTS), chooses


def _see_cancellation(judged: Sequence[Judged], a: Side, b: Side) -> None:
    """Find the terms of the results that are further apart than their own norm explains."""
    terms: tuple[Terms, Terms] | None = None
    for one in judged:
        mine, theirs = one.pair.a, one.pair.b
        if mine is None or theirs is None:
            continue
        for i, value in enumerate(one.values):
            if mine.kind == "state" and not value.slot.startswith("grad"):
                continue  # what an optimizer makes is no sum of what reached the module
            if (
                value.result
                and value.epsilon
                and not value.floor
                and _room(one, value, one.own) < value.interval.low < math.inf
            ):
                terms = terms or (Terms(_calls(judged, 0, a), a), Terms(_calls(judged, 1, b), b))
                times = cancelled(((mine, value.slot, terms[0]), (theirs, value.slot, terms[1])))
                if times != 1:
                    one.values[i] = value._replace(cancelled=times)


def _calls(judged: Sequence[Judged], which: int, side: Side) -> Iterator[Call]:
    """Yield the calls of one side, and what it holds of parameters beside them."""
    yield from side.step_data.calls
    for one in judged:
        call = one.pair.b if which else one.pair.a
        if call is not None and call.kind == "state":
            yield call


def enclosing(call: Call | None) -> Iterator[Call]:
    """Yield the calls that a call runs within, from the inside."""
    seen: set[int] = set()
    around = None if call is None else call.parent
    while isinstance(around, Call) and id(around) not in seen:
        yield around
        seen.add(id(around))
        around = around.parent


def _with_distances(pair: CallPair, measured: Measured) -> Judged:
    if pair.a is None or pair.b is None:
        return Judged(pair)
    argument, computed = other_argument(pair.a, pair.b)
    given = max(computed[1], measured.given)
    moved = max([computed[1], *(value.interval.low for value in measured.values if not value.result)])
    return Judged(
        pair,
        "missing",
        measured.values,
        given,
        measured.own,
        argument,
        computed,
        measured.weights,
        sums=measured.sums,
        moved=moved,
    )


def _outcome(one: Judged) -> Outcome:
    results = [value for value in one.values if value.result]
    if not any([value.interval.high for value in one.values]):  # noqa: C419  (here and below: a third faster)
        if any([value.formats for value in one.values]):  # noqa: C419
            return "rounding"
        if results:
            return "identical"
    if not results:  # nothing comes out, or nothing was recorded of it: what arrives is told where it comes from
        unknown = any(value.interval.evidence == "nothing" for value in one.values)
        return "bug" if one.argument else "unknown" if unknown else "carried" if one.given > 0 else "identical"
    low, high = max([value.low for value in results]), max([value.interval.high for value in results])
    if high == 0:
        return "identical"
    if low == 0 and any(value.interval.evidence == "absent" for value in results):
        return "missing"
    if low == 0:
        unknown = any(value.interval.evidence == "nothing" for value in results)
        return "unknown" if unknown else "carried" if one.given > 0 else "suspicious"
    return max([_of_result(one, value) for value in results], key=_GRAVITY.index)


def _of_result(one: Judged, value: Distance) -> Outcome:
    own = one.rounding(value)
    if value.beyond.times > 1:
        return "bug" if value.beyond.times > SURELY else "suspicious"
    room = own if one.argument else _room(one, value, own)
    if value.low <= room:
        return "rounding"
    if one.argument or one.given + own == 0:
        return "bug"
    carried = room + SLACK * one.given
    if value.low <= carried or math.isinf(one.given):
        return "carried"
    return "suspicious" if one.given > 0 and value.low <= SLACK * carried else "bug"


def _room(one: Judged, value: Distance, own: float) -> float:
    """Return how far a result may be apart by rounding alone: ten times its own, as statistics do not bound what arrives.

    Where elements of 16 bits are stored, all distances are known, and each rounding of a call moves its result once.
    """
    exact = all(each.interval.evidence in ("values", "bits") for each in one.values if each.interval.high > 0)
    if own <= COARSE or not exact or value.formats or value.floor or one.call.kind not in ("op", "module"):
        return SLACK * own
    return SLACK * own if one.call.phase == "backward" else 2 * roundings(one.call, (), joined=False)[0] * own
