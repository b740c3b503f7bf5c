"""Whether the optimizers of two layouts do the same: what they keep before a step, and what they make of a parameter.

Gradients of two layouts are apart by rounding, so what an optimizer makes of them is never quite the same. How far apart it may
be follows from what it is given, with d the furthest of that (gradient, weight, its own state, and all results before):

    a moment, a sum of squares       an average: at most ten times twice d
    a count of steps                 no further than it was before
    a matrix, and its update         a quotient by the size of a gradient turns the elements that are smaller than its rounding
                                     either way, about d of all: 2·√d of the update; ten times that, and a thirtieth at least
                                     (half, where it is made of a momentum, as Muon works in bfloat16)
    anything else                    whatever: of a vector, the elements of one part (the keys' bias) may all be rounding

What only one rank does is no rounding: copies that were alike before the step and are not behind it are a bug. The moments
that a step begins with may be as far apart as its gradients are (times a hundred): they are averages of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.intervals import interval
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.dump_compare.layouts.joined import JoinedSide
from trainprobe.dump_compare.parameter_states import AFTER, UPDATES, state_slot
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_AVERAGES = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "sum", "row_var", "col_var", "variance"),
)
_GRAVITY: tuple[Outcome, ...] = ("identical", "rounding", "carried", "bug")
_LEAST = 0.03  # of an update: less of it may be made of elements that are all rounding
_OF_MOMENTUM = 0.5  # of one that is made of a momentum, as Muon's, which is orthogonal to about bfloat16: up to 0.13 was seen


@dataclass(slots=True)
class _Parameter:
    """What was compared of one parameter: before the step, its gradients, and what the step makes of it."""

    given: Judged | None = None
    gradients: list[Judged] = field(default_factory=list[Judged])
    step: Judged | None = None


def judge_states(judged: Sequence[Judged], sides: tuple[JoinedSide, JoinedSide]) -> None:
    """Set what became of the states and steps of optimizers (see the module text)."""
    noise = 0.0  # the largest distance of a result
    found: dict[str, _Parameter] = {}
    for one in judged:
        call = one.pair.a
        if call is None or one.pair.b is None:
            continue
        if call.kind != "state" or call.phase != "step":
            noise = max([noise, *(value.low for value in one.values if value.result and value.low < math.inf)])
        if call.kind == "state":
            of_parameter = found.setdefault(call.name, _Parameter())
            if call.phase == "backward":
                of_parameter.gradients.append(one)
            elif any(value.result for value in one.values):
                of_parameter.step = one
            else:
                of_parameter.given = one
    for each in found.values():
        if each.given is not None:
            each.given.excused = frozenset(_excused(each.given, each.gradients, noise))
        if each.step is not None:
            _judge_step(each.step, each, noise, sides)


def _excused(given: Judged, gradients: Sequence[Judged], noise: float) -> Iterator[str]:
    """Yield the slots of what an optimizer keeps that is as far apart as gradients are."""
    far = [noise, *(value.interval.high for one in gradients for value in one.values)]
    for value in given.values:
        average = value.slot in _AVERAGES and value.interval.evidence != "replicas"
        if average and value.interval.low <= SLACK * SLACK * max(*far, value.epsilon):
            yield value.slot


def _judge_step(step: Judged, of: _Parameter, noise: float, sides: tuple[JoinedSide, JoinedSide]) -> None:
    given = [*(of.given.values if of.given is not None else ()), *(value for one in of.gradients for value in one.values)]
    before = {state_slot(value.slot): value for value in given}
    copies_apart = any(value.interval.evidence == "replicas" for value in given)
    far = max([noise, *(value.interval.high for value in given)])
    if far == 0 and not any(value.interval.evidence == "replicas" for value in step.values):
        return
    outcomes: list[Outcome] = []
    for value in step.values:
        low, own = value.interval.low, SLACK * value.epsilon
        if value.interval.high == 0 or not value.result:
            outcomes.append("identical")
        elif low <= own:
            outcomes.append("rounding" if low else "carried")
        elif value.interval.evidence == "replicas" and not copies_apart:
            outcomes.append("bug")
        else:
            outcomes.append("carried" if low <= own + _may_be(value, before, far, of, sides) else "bug")
    if step.outcome not in ("missing", "unknown"):
        step.given = far
        step.outcome = max(outcomes, key=_GRAVITY.index) if outcomes else "identical"


def _may_be(
    value: Distance, before: Mapping[str, Distance], far: float, of: _Parameter, sides: tuple[JoinedSide, JoinedSide]
) -> float:
    """Return how far what an optimizer makes may be apart, its own rounding left out."""
    slot = value.slot.removesuffix(AFTER)
    was = before[slot].interval.high if slot in before else 0.0
    if slot == "step":
        return was
    if slot in _AVERAGES:
        return SLACK * 2 * far
    if slot not in ("value", "main_value", *UPDATES) or not _is_matrix(of, sides):
        return math.inf
    alone = f"momentum_buffer{AFTER}" in {each.slot for each in (of.step.values if of.step is not None else ())}
    turned = max(2 * SLACK * math.sqrt(far), _OF_MOMENTUM if alone else _LEAST)
    if turned >= 1:
        return math.inf
    return turned if slot in UPDATES else SLACK * was + turned * _moved(of, slot, sides)


def _is_matrix(of: _Parameter, sides: tuple[JoinedSide, JoinedSide]) -> bool:
    """Return whether a parameter is known to have several dimensions; flat pieces do not say it."""
    calls = _calls(of.given)
    shapes = [
        shape for call, side in zip(calls, sides, strict=False) for _, value in slots(call) for shape in side.shapes(value)
    ]
    return any(len(shape) > 1 for shape in shapes)


def _moved(of: _Parameter, slot: str, sides: tuple[JoinedSide, JoinedSide]) -> float:
    """Return how far the step moves a parameter, as what the dumps hold shows it: on the side where that is more."""
    moved = 0.0
    for given, step, side in zip(_calls(of.given), _calls(of.step), sides, strict=False):
        old, new = _value_at(given, slot), _value_at(step, slot + AFTER)
        if old is not None and new is not None:
            moved = max(moved, interval(side, old, side, new).low)
    return moved


def _calls(one: Judged | None) -> list[Call]:
    return [] if one is None else [call for call in (one.pair.a, one.pair.b) if call is not None]


def _value_at(call: Call, slot: str) -> Value | None:
    return next((value for at, value in slots(call) if state_slot(at) == slot), None)
