"""The first call of a rank that differs, or is given something else than on the other side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainprobe.dump_compare.between_steps import Left, changed
from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.intervals import OTHER_ORDER, Interval
from trainprobe.dump_compare.judge import Judged, enclosing
from trainprobe.dump_compare.one_sided import given_alone_around, lone_module_before
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call


def first_of(
    calls: Sequence[Judged],
    explained: bool = False,
    later: bool = False,
    left: Left | None = None,
    joined: bool = False,
) -> Judged | None:
    """Return the first call that is given something else than on the other side, or gives it; the innermost of nested ones.

    explained: the weights may be apart for what was in the steps before; the batch may not. later: whether there are steps
    before, in which an optimizer may have rounded. What is suspicious counts where nothing else does. left: how far apart the
    step before has left weights and states; what begins further apart was changed in between. joined: whether ranks were
    joined, between whose operators collectives run.
    """
    start = _first_result(calls)  # what is given behind it may come from there
    arrives = [
        judged
        for judged in calls
        if judged.pair.place <= start and given_another(judged, _is_of_the_batch if explained else None) is not None
    ]
    arrives += [] if explained or later else _other_weights(calls, start)
    arrives += [judged for judged in calls if changed(judged, left)] if left else []
    arrives += _other_losses(calls)
    arrives += _other_operands(calls) if joined and not (explained or later) else []
    for outcome in ("bug", "suspicious"):
        wrong = [judged for judged in calls if judged.outcome == outcome]
        outer = {id(call) for judged in (*wrong, *arrives) for call in enclosing(judged.pair.a)}
        inner = [judged for judged in wrong if id(judged.pair.a) not in outer]
        found = min([*arrives, *inner], key=_place, default=None)
        if found is not None:
            return _comes_from(calls, found)
    return None


def _comes_from(calls: Sequence[Judged], found: Judged) -> Judged:
    """Return what one side alone has that a call which is given something else follows from, or else that call."""
    given = given_another(found)
    if given is None or given.slot.startswith("parameters") or found.outcome in ("bug", "suspicious"):
        return found
    return given_alone_around(calls, found) or lone_module_before(calls, found) or found


def _other_weights(calls: Sequence[Judged], start: float) -> list[Judged]:
    """Return first forwards of modules behind `start` whose weights are others: no call before can be what they come from."""
    first = (one for one in calls if one.pair.place > start and one.call.call == 0 and one.call.phase == "forward")
    return [one for one in first if one.call.kind == "module" and given_another(one, is_a_weight) is not None]


def is_a_weight(call: Call, value: Distance) -> bool:
    """Return whether a value is a weight that differs, or holds its numbers in another order."""
    return value.slot.startswith("parameters") and (value.interval.low > 0 or value.interval == OTHER_ORDER)


def _other_losses(calls: Sequence[Judged]) -> list[Judged]:
    """Return backwards of modules that are given a gradient far from anything before: the loss, or its gradient, is another.

    Those that run within a module whose backward gives something are left out, as that tells whether the gradient is right.
    """
    modules = [one for one in calls if one.call.kind == "module" and one.call.phase == "backward"]
    giving = {one.call.name for one in modules if any(value.result for value in one.values)}
    backwards = {id(one) for one in modules if giving.isdisjoint(around.name for around in enclosing(one.call))}
    noise, found = 0.0, list[Judged]()
    for judged in calls:
        if id(judged) in backwards:
            far = max((value.low for value in judged.values if not value.result), default=0.0)
            found += [judged] if far > SLACK * SLACK * max(noise, judged.own) else []
        noise = max([noise, *(value.low for value in judged.values if value.result and value.low < math.inf)])
    return found


def _other_operands(calls: Sequence[Judged]) -> list[Judged]:
    """Return forwards of operators that are given something far from all results before: a weight, or what ranks sent."""
    noise, found = 0.0, list[Judged]()
    end = next((i for i, one in enumerate(calls) if one.call.phase == "backward"), len(calls))  # then gradients and optimizers
    for judged in (one for one in calls[:end] if one.call.kind == "op" and one.call.phase == "forward"):
        far = max((value.low for value in judged.values if not value.result and value.low < math.inf), default=0.0)
        found += [judged] if far > SLACK * SLACK * max(noise, judged.own) else []
        noise = max([noise, *(value.low for value in judged.values if value.result and value.low < math.inf)])
    return found


def _place(judged: Judged) -> int:
    return judged.pair.place


def _first_result(calls: Sequence[Judged]) -> float:
    """Return the place of the first call whose results are apart, of nested ones the innermost; of none, that of the end."""
    differ = (judged for judged in calls if judged.outcome != "identical")
    apart = [judged for judged in differ if any(value.result and is_apart(value.interval) for value in judged.values)]
    outer = {id(call) for judged in apart for call in enclosing(judged.pair.a)}
    return min((judged.pair.place for judged in apart if id(judged.pair.a) not in outer), default=math.inf)


def is_apart(far: Interval) -> bool:
    """Return whether two values that both sides have may differ."""
    return far.high > 0 and far.evidence != "absent"


def given_another(judged: Judged, counts: Callable[[Call, Distance], bool] | None = None) -> Distance | None:
    """Return the first value that a call is given and that is not the same stored numbers on both sides.

    counts: which values to look at, all of them where it is None.
    """
    if judged.given == 0:
        return None
    given = (value for value in judged.values if not value.result and value.another and value.slot not in judged.excused)
    return next((value for value in given if counts is None or counts(judged.call, value)), None)


def _is_of_the_batch(call: Call, value: Distance) -> bool:
    """Return whether training does not change a value: whole numbers, and what the model is called with."""
    root = call.kind == "module" and call.name == ROOT and call.phase == "forward"
    return value.epsilon == 0 or (root and not value.slot.startswith("parameters"))
