"""What one side alone has: a tensor that is given to a call, a module, and all behind the place where a dump ends."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.dump_compare.arguments import tensor_alone
from trainprobe.dump_compare.judge import Judged, enclosing

_TAIL = 0.05  # of all calls: so many at the end of one side alone are a dump that ends, and not an operator more


def side_alone(judged: Judged) -> str:
    """Return the side that alone has a call, "" for one that both have."""
    return "A" if judged.pair.b is None else "B" if judged.pair.a is None else ""


def tensor_of_one(judged: Judged) -> str:
    """Return which tensor only one side gives to a call, as text or ""."""
    a, b = judged.pair.a, judged.pair.b
    return "" if a is None or b is None else tensor_alone(a, b)


def given_alone_around(calls: Sequence[Judged], found: Judged) -> Judged | None:
    """Return the innermost call around one that is given something else, to which one side alone gives a tensor."""
    around = {id(call) for call in enclosing(found.pair.a)}
    getting = [one for one in calls if id(one.pair.a) in around and one.outcome != "identical" and tensor_of_one(one)]
    return max(getting, key=lambda one: one.pair.place, default=None)


def lone_module_before(calls: Sequence[Judged], found: Judged) -> Judged | None:
    """Return the module that one side alone runs right before a call that is given something else, beside it or around it."""
    around = {id(call) for side in (found.pair.a, found.pair.b) for call in enclosing(side)}
    behind = [one for one in calls if one.pair.place < found.pair.place and one.call.kind == "module"]
    beside = [one for one in behind if one.call.phase == "forward" and any(id(call) in around for call in enclosing(one.call))]
    last = max((one.pair.place for one in beside if not side_alone(one) and id(one.call) not in around), default=-1)
    lone = [one for one in beside if side_alone(one) and one.pair.place > last]
    return min(lone, key=lambda one: one.pair.place, default=None)


def cut_short(calls: Sequence[Judged], agreeing: int, cut: tuple[bool, bool], where: str) -> str:
    """Return which side ends before the other, as text or "".

    agreeing: how many calls are not among `calls`. cut: whether each dump says that its step did not end.
    """
    total = len(calls) + agreeing
    for side, other, did_not_end in (("A", "B", cut[0]), ("B", "A", cut[1])):
        alone = [one for one in calls if side_alone(one) == other]
        lone = [one.pair.place for one in alone]
        many = len(lone) >= max(2, _TAIL * total) and any(one.call.kind != "state" for one in alone)  # states: of a monitor
        own = [one.call.parent for one in calls if side_alone(one) == side]
        follows = 2 * len(own) < total - len(lone)  # dumps of two levels have hardly a call in common
        updates = "optimizer" in own and all(one.call.parent == "optimizer" for one in alone)  # by other operators
        if lone and follows and not updates and min(lone) == total - len(lone) and (did_not_end or many):
            return f"{side} ends after {total - len(lone)} of {total} calls ({where})"
        if did_not_end:
            return f"{side} holds a step that did not end ({where})"
    return ""
